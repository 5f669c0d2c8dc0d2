#include "io/curl/curl_trust.h"

#include <algorithm>
#include <array>
#include <mutex>
#include <new>

#include "core/per_process.h"

namespace tensorizer::io {
namespace {

// Libcurl reads the trust anchors again after so long: a file may be replaced.
constexpr long kAnchorsSeconds = 60;

// Name look-ups and TLS sessions, which libcurl resumes only under the same trust.
class Share {
 public:
  Share() : share_(curl_share_init()) {
    if (share_ == nullptr) throw std::bad_alloc();
    curl_share_setopt(share_, CURLSHOPT_USERDATA, this);
    curl_share_setopt(share_, CURLSHOPT_LOCKFUNC, &Share::lock);
    curl_share_setopt(share_, CURLSHOPT_UNLOCKFUNC, &Share::unlock);
    curl_share_setopt(share_, CURLSHOPT_SHARE, CURL_LOCK_DATA_DNS);
    curl_share_setopt(share_, CURLSHOPT_SHARE, CURL_LOCK_DATA_SSL_SESSION);
  }
  Share(const Share&) = delete;
  Share& operator=(const Share&) = delete;
  ~Share() { curl_share_cleanup(share_); }

  CURLSH* handle() const noexcept { return share_; }

 private:
  static void lock(CURL*, curl_lock_data data, curl_lock_access, void* self) noexcept {
    static_cast<Share*>(self)->mutexes_[static_cast<size_t>(data)].lock();
  }
  static void unlock(CURL*, curl_lock_data data, void* self) noexcept {
    static_cast<Share*>(self)->mutexes_[static_cast<size_t>(data)].unlock();
  }

  CURLSH* share_;
  std::array<std::mutex, CURL_LOCK_DATA_LAST> mutexes_;
};

PerProcess<Share> share_of_process;

// A file alone replaces the built-in folder as well, and a folder the built-in file. Without a
// folder libcurl keeps the anchors that it has parsed.
void set_places(CURL* easy, const CurlTrust& trust, CURLoption file, CURLoption folder) {
  if (trust.ca_file.empty() && trust.ca_path.empty()) return;
  curl_easy_setopt(easy, file, trust.ca_file.empty() ? nullptr : trust.ca_file.c_str());
  curl_easy_setopt(easy, folder, trust.ca_path.empty() ? nullptr : trust.ca_path.c_str());
}

}  // namespace

std::optional<std::pair<std::string, std::string>> built_in_anchors() {
#if LIBCURL_VERSION_NUM >= 0x074600  // 7.70; a library that is older than its headers does not say
  const curl_version_info_data* info = curl_version_info(CURLVERSION_NOW);
  if (info->age >= CURLVERSION_SEVENTH)
    return std::pair<std::string, std::string>(info->cainfo ? info->cainfo : "",
                                               info->capath ? info->capath : "");
#endif
  return std::nullopt;
}

void apply_common_options(CURL* easy, std::chrono::milliseconds connect_timeout) {
  curl_easy_setopt(easy, CURLOPT_NOSIGNAL, 1L);
#if LIBCURL_VERSION_NUM >= 0x075500
  curl_easy_setopt(easy, CURLOPT_PROTOCOLS_STR, "http,https");
#else
  curl_easy_setopt(easy, CURLOPT_PROTOCOLS, static_cast<long>(CURLPROTO_HTTP | CURLPROTO_HTTPS));
#endif
  curl_easy_setopt(easy, CURLOPT_TCP_KEEPALIVE, 1L);
  // Processes that load the same model at the same time begin with different servers of its host.
  curl_easy_setopt(easy, CURLOPT_DNS_SHUFFLE_ADDRESSES, 1L);
  curl_easy_setopt(easy, CURLOPT_CONNECTTIMEOUT_MS,
                   std::max<long>(1, static_cast<long>(connect_timeout.count())));
#if LIBCURL_VERSION_NUM >= 0x075700
  curl_easy_setopt(easy, CURLOPT_QUICK_EXIT, 1L);  // a stop does not wait for a name server
#endif
}

void apply_trust(CURL* easy, const CurlTrust& trust) {
  curl_easy_setopt(easy, CURLOPT_SHARE, share_of_process.get().handle());
  // An https proxy is trusted like the server behind it; libcurl has options for each.
  set_places(easy, trust, CURLOPT_CAINFO, CURLOPT_CAPATH);
  set_places(easy, trust, CURLOPT_PROXY_CAINFO, CURLOPT_PROXY_CAPATH);
#if LIBCURL_VERSION_NUM >= 0x075700
  curl_easy_setopt(easy, CURLOPT_CA_CACHE_TIMEOUT, kAnchorsSeconds);
#endif
  if (!trust.verify_peer) {
    curl_easy_setopt(easy, CURLOPT_PROXY_SSL_VERIFYPEER, 0L);
    curl_easy_setopt(easy, CURLOPT_PROXY_SSL_VERIFYHOST, 0L);
  }
  curl_easy_setopt(easy, CURLOPT_SSL_VERIFYPEER, trust.verify_peer ? 1L : 0L);
  curl_easy_setopt(easy, CURLOPT_SSL_VERIFYHOST, trust.verify_peer ? 2L : 0L);
}

}  // namespace tensorizer::io
