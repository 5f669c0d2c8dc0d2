#include "io/curl/curl_trust.h"

#include <openssl/ssl.h>
#include <openssl/x509.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <string_view>

#include "core/per_process.h"
#include "core/sync.h"

namespace tensorizer::io {
namespace {

// Exists nowhere. Where a trust store of ours is used libcurl must not add anchors of its own,
// which some builds do where neither file nor folder is set.
constexpr const char* kNoFolder = "/dev/null/no-certificates";

std::string state_of(const std::string& path) {
  struct stat info{};
  if (path.empty() || stat(path.c_str(), &info) != 0) return path;
  return path + '\0' + std::to_string(info.st_ino) + '.' + std::to_string(info.st_size) + '.' +
         std::to_string(info.st_mtim.tv_sec) + '.' + std::to_string(info.st_mtim.tv_nsec);
}

struct StoreDeleter {
  void operator()(X509_STORE* store) const noexcept { X509_STORE_free(store); }
};
using UniqueStore = std::unique_ptr<X509_STORE, StoreDeleter>;

// True where libcurl's TLS library is the OpenSSL that we were linked with, so that the one may use
// the other's objects.
bool libcurl_shares_openssl() {
  static const bool same = [] {
    const curl_version_info_data* info = curl_version_info(CURLVERSION_NOW);
    const std::string_view curls = info->ssl_version == nullptr ? "" : info->ssl_version;
    std::string_view ours = OpenSSL_version(OPENSSL_VERSION);  // "OpenSSL 3.0.16 11 Feb 2025"
    constexpr std::string_view kName = "OpenSSL ";
    if (!ours.starts_with(kName)) return false;
    ours.remove_prefix(kName.size());
    return curls == "OpenSSL/" + std::string(ours.substr(0, ours.find(' ')));
  }();
  return same;
}

// File and folder that libcurl would read; both empty where it does not tell.
std::pair<std::string, std::string> paths_of(const CurlTrust& trust) {
  if (!trust.ca_file.empty() || !trust.ca_path.empty()) return {trust.ca_file, trust.ca_path};
  return built_in_anchors().value_or(std::pair<std::string, std::string>());
}

// nullptr where libcurl has to read the anchors by itself, and to report what is wrong with them.
UniqueStore make_store(const CurlTrust& trust) {
  if (!trust.reads_anchors || !trust.verify_peer || !libcurl_shares_openssl()) return nullptr;
  const auto [ca_file, ca_path] = paths_of(trust);
  if (ca_file.empty() && ca_path.empty()) return nullptr;
  UniqueStore store(X509_STORE_new());
  if (!store) throw std::bad_alloc();
  const char* file = ca_file.empty() ? nullptr : ca_file.c_str();
  const char* folder = ca_path.empty() ? nullptr : ca_path.c_str();
  if (X509_STORE_load_locations(store.get(), file, folder) != 1) return nullptr;
  // Now, while no other thread looks: libcurl adds the folder before every handshake.
  X509_STORE_load_locations(store.get(), nullptr, kNoFolder);
  // As libcurl sets them: a certificate may be its own anchor.
  X509_STORE_set_flags(store.get(), X509_V_FLAG_TRUSTED_FIRST | X509_V_FLAG_PARTIAL_CHAIN);
  return store;
}

// For one trust. Never destroyed.
class Share {
 public:
  explicit Share(const CurlTrust& trust) : store_(make_store(trust)), share_(curl_share_init()) {
    if (share_ == nullptr) throw std::bad_alloc();
    curl_share_setopt(share_, CURLSHOPT_USERDATA, this);
    curl_share_setopt(share_, CURLSHOPT_LOCKFUNC, &Share::lock);
    curl_share_setopt(share_, CURLSHOPT_UNLOCKFUNC, &Share::unlock);
    curl_share_setopt(share_, CURLSHOPT_SHARE, CURL_LOCK_DATA_DNS);
    curl_share_setopt(share_, CURLSHOPT_SHARE, CURL_LOCK_DATA_SSL_SESSION);
  }

  CURLSH* handle() const noexcept { return share_; }
  X509_STORE* store() const noexcept { return store_.get(); }

 private:
  static void lock(CURL*, curl_lock_data data, curl_lock_access, void* self) noexcept {
    static_cast<Share*>(self)->mutexes_[static_cast<size_t>(data)].lock();
  }
  static void unlock(CURL*, curl_lock_data data, void* self) noexcept {
    static_cast<Share*>(self)->mutexes_[static_cast<size_t>(data)].unlock();
  }

  UniqueStore store_;
  CURLSH* share_;
  std::array<std::mutex, CURL_LOCK_DATA_LAST> mutexes_;
};

// Internally locked.
class Shares {
 public:
  Share& of(const CurlTrust& trust) {
    const std::string key = trust.key();
    MutexLock lock(mutex_);
    std::unique_ptr<Share>& share = shares_[key];
    if (!share) share = std::make_unique<Share>(trust);
    return *share;
  }

 private:
  Mutex mutex_;
  std::map<std::string, std::unique_ptr<Share>> shares_ GUARDED_BY(mutex_);
};

PerProcess<Shares> shares_of_process;

void set_places(CURL* easy, const CurlTrust& trust, CURLoption file, CURLoption folder) {
  if (!trust.ca_file.empty()) curl_easy_setopt(easy, file, trust.ca_file.c_str());
  if (trust.ca_path.empty()) return;
  curl_easy_setopt(easy, folder, trust.ca_path.c_str());
  // A folder alone replaces the built-in bundle, as a file does.
  if (trust.ca_file.empty()) curl_easy_setopt(easy, file, nullptr);
}

CURLcode use_store(CURL*, void* context, void* store) noexcept {
  SSL_CTX_set1_cert_store(static_cast<SSL_CTX*>(context), static_cast<X509_STORE*>(store));
  return CURLE_OK;
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

std::string CurlTrust::key() const {
  if (!reads_anchors) return "in clear";
  const auto [file, folder] = paths_of(*this);
  std::string text = state_of(file) + '\n' + state_of(folder) + '\n';
  text += state_of(certificate_file) + '\n' + state_of(key_file) + '\n';
  text += verify_peer ? 'p' : '-';
  text += verify_host ? 'h' : '-';
  return text;
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
  const Share& share = shares_of_process.get().of(trust);
  curl_easy_setopt(easy, CURLOPT_SHARE, share.handle());
  if (X509_STORE* store = share.store()) {
    curl_easy_setopt(easy, CURLOPT_CAINFO, nullptr);
    curl_easy_setopt(easy, CURLOPT_CAPATH, kNoFolder);
    // Connections to an HTTPS proxy get the same store, to which nothing may be added either.
    curl_easy_setopt(easy, CURLOPT_PROXY_CAINFO, nullptr);
    curl_easy_setopt(easy, CURLOPT_PROXY_CAPATH, kNoFolder);
    curl_easy_setopt(easy, CURLOPT_SSL_CTX_FUNCTION, &use_store);
    curl_easy_setopt(easy, CURLOPT_SSL_CTX_DATA, store);
  } else {
    // An https proxy is trusted like the server behind it; libcurl has options for each.
    set_places(easy, trust, CURLOPT_CAINFO, CURLOPT_CAPATH);
    set_places(easy, trust, CURLOPT_PROXY_CAINFO, CURLOPT_PROXY_CAPATH);
  }
  if (!trust.verify_peer) {
    curl_easy_setopt(easy, CURLOPT_PROXY_SSL_VERIFYPEER, 0L);
    curl_easy_setopt(easy, CURLOPT_PROXY_SSL_VERIFYHOST, 0L);
  }
  curl_easy_setopt(easy, CURLOPT_SSL_VERIFYPEER, trust.verify_peer ? 1L : 0L);
  curl_easy_setopt(easy, CURLOPT_SSL_VERIFYHOST, trust.verify_peer && trust.verify_host ? 2L : 0L);
  if (trust.certificate_file.empty()) return;
  const std::string& key = trust.key_file.empty() ? trust.certificate_file : trust.key_file;
  curl_easy_setopt(easy, CURLOPT_SSLCERT, trust.certificate_file.c_str());
  curl_easy_setopt(easy, CURLOPT_SSLKEY, key.c_str());
}

}  // namespace tensorizer::io
