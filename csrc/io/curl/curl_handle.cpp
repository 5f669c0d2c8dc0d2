#include "io/curl/curl_handle.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <new>
#include <string_view>
#include <utility>

#include "core/error.h"

namespace tensorizer::io {
namespace {

constexpr std::chrono::milliseconds kPollInterval{100};

void initialise_curl() {
  static std::once_flag once;
  std::call_once(once, [] {
    if (curl_global_init(CURL_GLOBAL_DEFAULT) != CURLE_OK)
      throw Error(Errc::io, "libcurl could not be initialised");
  });
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

CurlLane::CurlLane() : process_(getpid()) {
  initialise_curl();
  multi_.reset(curl_multi_init());
  if (!multi_) throw std::bad_alloc();
  // A request that replaces a slow one is only worth something on a connection of its own.
  curl_multi_setopt(multi_.get(), CURLMOPT_PIPELINING, static_cast<long>(CURLPIPE_NOTHING));
  curl_multi_setopt(multi_.get(), CURLMOPT_MAXCONNECTS, 2L);
}

CurlLane::~CurlLane() {
  if (!belongs_to_this_process()) {
    // Closing would say good-bye on connections that the parent still uses.
    for (UniqueCurlEasy& easy : spare_) (void)easy.release();
    (void)multi_.release();
    return;
  }
  SigpipeGuard guard;
  spare_.clear();
  multi_.reset();
}

bool CurlLane::belongs_to_this_process() const noexcept { return getpid() == process_; }

UniqueCurlEasy CurlLane::take_easy() {
  if (!spare_.empty()) {
    UniqueCurlEasy easy = std::move(spare_.back());
    spare_.pop_back();
    return easy;
  }
  UniqueCurlEasy easy(curl_easy_init());
  if (!easy) throw std::bad_alloc();
  spare_.reserve(spare_.size() + 2);  // give_easy must not throw
  return easy;
}

void CurlLane::give_easy(UniqueCurlEasy easy) noexcept {
  if (!easy || spare_.size() == spare_.capacity()) return;
  curl_easy_reset(easy.get());
  spare_.push_back(std::move(easy));
}

void CurlLane::add(CURL* easy) {
  const CURLMcode code = curl_multi_add_handle(multi_.get(), easy);
  if (code != CURLM_OK) throw Error(Errc::io, std::string("libcurl: ") + curl_multi_strerror(code));
}

void CurlLane::remove(CURL* easy) noexcept {
  SigpipeGuard guard;
  curl_multi_remove_handle(multi_.get(), easy);
}

void CurlLane::perform() {
  int running = 0;
  const CURLMcode code = curl_multi_perform(multi_.get(), &running);
  if (code != CURLM_OK) throw Error(Errc::io, std::string("libcurl: ") + curl_multi_strerror(code));
  int left = 0;
  while (CURLMsg* message = curl_multi_info_read(multi_.get(), &left)) {
    if (message->msg != CURLMSG_DONE) continue;
    const CURLcode result = message->data.result;
    char* target = nullptr;
    curl_easy_getinfo(message->easy_handle, CURLINFO_PRIVATE, &target);
    if (target == nullptr) continue;
    auto* completion = reinterpret_cast<CurlCompletion*>(target);
    completion->code = result;
    completion->done = true;
  }
}

void CurlLane::wait(std::chrono::milliseconds timeout) {
  int ready = 0;
  const CURLMcode code =
      curl_multi_poll(multi_.get(), nullptr, 0, static_cast<int>(timeout.count()), &ready);
  if (code != CURLM_OK) throw Error(Errc::io, std::string("libcurl: ") + curl_multi_strerror(code));
}

CurlVerdict curl_verdict(CURLcode code, const std::string& text) {
  CurlVerdict verdict{"curl error " + std::to_string(static_cast<int>(code))};
  switch (code) {
    case CURLE_OUT_OF_MEMORY:  // also what libcurl says of a header line beyond its bounds
      verdict.hint = "the head of the response may be too large";
      break;
    case CURLE_COULDNT_RESOLVE_PROXY:
    case CURLE_COULDNT_RESOLVE_HOST:
      verdict.transient = true;
      verdict.hint = "check the host name and the name server";
      break;
    case CURLE_COULDNT_CONNECT:
      verdict.transient = true;
      verdict.hint = "check that the server runs and can be reached";
      break;
    case CURLE_OPERATION_TIMEDOUT:
      verdict.transient = true;
      verdict.hint = "the server may be unreachable; the connect timeout can be raised";
      break;
    case CURLE_PARTIAL_FILE:
    case CURLE_GOT_NOTHING:
    case CURLE_SEND_ERROR:
    case CURLE_RECV_ERROR:
    case CURLE_HTTP2:
    case CURLE_HTTP2_STREAM:
      verdict.transient = true;
      verdict.hint = "the connection broke";
      break;
    case CURLE_SSL_CONNECT_ERROR:
      verdict.transient = handshake_broke_off(text);
      verdict.hint = "check that the server speaks TLS on this port";
      break;
    case CURLE_PEER_FAILED_VERIFICATION:
      verdict.name = "cURL exit code 60";
      verdict.hint =
          "the server's certificate is not trusted: pass CAInfo(cacert=...) or set CURL_CA_BUNDLE";
      break;
    case CURLE_SSL_CACERT_BADFILE:
      verdict.hint = "the file or folder of trusted certificates cannot be read";
      break;
    case CURLE_UNSUPPORTED_PROTOCOL:
    case CURLE_WEIRD_SERVER_REPLY:
      verdict.hint = "the server does not speak HTTP";
      break;
    default:
      break;
  }
  return verdict;
}

void drive(CurlLane& lane, const std::stop_token& stop, const std::function<bool()>& done) {
  SigpipeGuard guard;
  std::stop_callback wake(stop, [&lane] { lane.wake(); });
  for (;;) {
    lane.perform();
    if (done()) return;
    throw_if_stopped(stop);
    lane.wait(kPollInterval);
  }
}

}  // namespace tensorizer::io
