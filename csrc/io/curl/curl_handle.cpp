#include "io/curl/curl_handle.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <mutex>
#include <new>
#include <utility>

#include "core/error.h"
#include "core/stop.h"
#include "io/curl/curl_connection.h"

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
  // A hedge is only worth something on a connection of its own.
  curl_multi_setopt(multi_.get(), CURLMOPT_PIPELINING, static_cast<long>(CURLPIPE_NOTHING));
  curl_multi_setopt(multi_.get(), CURLMOPT_MAXCONNECTS, 2L);
}

CurlLane::~CurlLane() {
  kept_connection_.reset();  // its handle is the lane's
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
  const unsigned watched = watched_.fd == CURL_SOCKET_BAD ? 0 : 1;
  const CURLMcode code =
      curl_multi_poll(multi_.get(), &watched_, watched, static_cast<int>(timeout.count()), &ready);
  if (code != CURLM_OK) throw Error(Errc::io, std::string("libcurl: ") + curl_multi_strerror(code));
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
