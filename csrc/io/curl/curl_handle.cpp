#include "io/curl/curl_handle.h"

#include <pthread.h>
#include <signal.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <mutex>
#include <new>
#include <string_view>
#include <utility>

#include "core/error.h"
#include "core/unique_fd.h"

namespace tensorizer::io {
namespace {

// Held across a fork: no child finds libcurl half initialised.
constinit std::mutex initialising;
[[maybe_unused]] const int holding = pthread_atfork(
    [] { initialising.lock(); }, [] { initialising.unlock(); }, [] { initialising.unlock(); });

void initialise_curl() {
  static constinit std::atomic<bool> done{false};
  if (done.load(std::memory_order_acquire)) return;
  const std::lock_guard lock(initialising);
  if (done.load(std::memory_order_relaxed)) return;
  if (curl_global_init(CURL_GLOBAL_DEFAULT) != CURLE_OK)
    throw Error(Errc::io, "libcurl could not be initialised");
  done.store(true, std::memory_order_release);
}

sigset_t sigpipe_set() noexcept {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGPIPE);
  return set;
}

// CURLE_SSL_CONNECT_ERROR stands for a handshake that broke off and for two sides that do not fit;
// only the words of the TLS library (OpenSSL, GnuTLS and others) tell.
bool handshake_broke_off(const std::string& text) {
  constexpr std::array<std::string_view, 7> kWords = {
      "reset",      "SYSCALL",     "unexpected eof", "unexpected EOF",
      "terminated", "Broken pipe", "timed out"};
  return std::any_of(kWords.begin(), kWords.end(),
                     [&](std::string_view word) { return text.find(word) != std::string::npos; });
}

constexpr const char* kBroke = "the connection broke";
constexpr const char* kUnknownHost = "check the host name and the name server";
constexpr const char* kNotHttp = "the server does not speak HTTP";

struct Meaning {
  CURLcode code;
  bool transient;
  const char* hint;
};
constexpr Meaning kMeanings[] = {
    // Also what libcurl says of a header line beyond its bounds.
    {CURLE_OUT_OF_MEMORY, false, "the head of the response may be too large"},
    {CURLE_COULDNT_RESOLVE_PROXY, true, kUnknownHost},
    {CURLE_COULDNT_RESOLVE_HOST, true, kUnknownHost},
    {CURLE_COULDNT_CONNECT, true, "check that the server runs and can be reached"},
    {CURLE_OPERATION_TIMEDOUT, true,
     "the server may be unreachable; the connect timeout can be raised"},
    {CURLE_PARTIAL_FILE, true, kBroke},
    {CURLE_GOT_NOTHING, true, kBroke},
    {CURLE_SEND_ERROR, true, kBroke},
    {CURLE_RECV_ERROR, true, kBroke},
    {CURLE_HTTP2, true, kBroke},
    {CURLE_HTTP2_STREAM, true, kBroke},
    {CURLE_SSL_CONNECT_ERROR, false, "check that the server speaks TLS on this port"},
    {CURLE_PEER_FAILED_VERIFICATION, false,
     "the server's certificate is for another host, or not trusted: check the host's name, pass "
     "CAInfo(cacert=...) or set CURL_CA_BUNDLE"},
    {CURLE_SSL_CACERT_BADFILE, false, "the file or folder of trusted certificates cannot be read"},
    {CURLE_UNSUPPORTED_PROTOCOL, false, kNotHttp},
    {CURLE_WEIRD_SERVER_REPLY, false, kNotHttp}};

}  // namespace

void append_line(UniqueCurlList& list, const std::string& line) {
  curl_slist* longer = curl_slist_append(list.get(), line.c_str());
  if (longer == nullptr) throw std::bad_alloc();
  (void)list.release();
  list.reset(longer);
}

SigpipeGuard::SigpipeGuard() noexcept {
  sigset_t pending;
  sigpending(&pending);
  if (sigismember(&pending, SIGPIPE) == 1) return;  // not ours: leave it as it is
  const sigset_t set = sigpipe_set();
  sigset_t before;
  pthread_sigmask(SIG_BLOCK, &set, &before);
  blocked_ = sigismember(&before, SIGPIPE) == 0;
}

SigpipeGuard::~SigpipeGuard() {
  if (!blocked_) return;
  const sigset_t set = sigpipe_set();
  sigset_t pending;
  sigpending(&pending);
  if (sigismember(&pending, SIGPIPE) == 1) {
    int signal_number = 0;
    sigwait(&set, &signal_number);
  }
  pthread_sigmask(SIG_UNBLOCK, &set, nullptr);
}

UniqueCurlEasy new_curl_easy() {
  initialise_curl();
  UniqueCurlEasy easy(curl_easy_init());
  if (!easy) throw std::bad_alloc();
  return easy;
}

UniqueCurlMulti new_curl_multi() {
  initialise_curl();
  UniqueCurlMulti multi(curl_multi_init());
  if (!multi) return multi;
  // One connection for each transfer: several streams of HTTP/2 in one would share its speed.
  curl_multi_setopt(multi.get(), CURLMOPT_PIPELINING, static_cast<long>(CURLPIPE_NOTHING));
  return multi;
}

std::string curl_error_text(const char* buffer, CURLcode code) {
  return buffer[0] != '\0' ? buffer : curl_easy_strerror(code);
}

int curl_system_errno(CURL* easy, CURLcode code) {
  long found = 0;
  if (code == CURLE_COULDNT_CONNECT || code == CURLE_SEND_ERROR || code == CURLE_RECV_ERROR)
    curl_easy_getinfo(easy, CURLINFO_OS_ERRNO, &found);
  if (code != CURLE_COULDNT_CONNECT || found != 0) return static_cast<int>(found);
  // Of a socket that it did not get, libcurl tells nothing.
  const UniqueFd another(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  return another ? 0 : errno;
}

CurlVerdict curl_verdict(CURLcode code, const std::string& text) {
  CurlVerdict verdict{code == CURLE_PEER_FAILED_VERIFICATION
                          ? "cURL exit code 60"
                          : "curl error " + std::to_string(static_cast<int>(code))};
  const auto* found = std::ranges::find(kMeanings, code, &Meaning::code);
  if (found == std::end(kMeanings)) return verdict;
  verdict.hint = found->hint;
  verdict.transient =
      code == CURLE_SSL_CONNECT_ERROR ? handshake_broke_off(text) : found->transient;
  return verdict;
}

}  // namespace tensorizer::io
