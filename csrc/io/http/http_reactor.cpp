#include "io/http/http_reactor.h"

#include <signal.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>
#include <system_error>
#include <utility>

#include "core/error.h"
#include "core/per_process.h"
#include "core/threads.h"
#include "io/http/http_message.h"

namespace tensorizer::io {
namespace {

// How long threads and connections outlast the last source: the next one may come at once.
constexpr std::chrono::milliseconds kUnused{200};
constexpr int kWaitMs = 10'000;

PerProcess<HttpReactor> reactor_of_process;

// Signals are for the threads of the program.
class BlockedSignals {
 public:
  BlockedSignals() noexcept {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before_);
  }
  ~BlockedSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  BlockedSignals(const BlockedSignals&) = delete;
  BlockedSignals& operator=(const BlockedSignals&) = delete;

 private:
  sigset_t before_;
};

}  // namespace

HttpTransfer::HttpTransfer() : easy_(new_curl_easy()) {}

HttpReactor& HttpReactor::of_process() { return reactor_of_process.get(); }

HttpPlace::HttpPlace(HttpPlaces& places, const std::stop_token& stop)
    : reactor_(HttpReactor::of_process()), places_(places) {
  reactor_.acquire(places, stop);
  begun_ = HttpReactor::Clock::now();
}

HttpPlace::~HttpPlace() {
  if (&reactor_ == &HttpReactor::of_process()) reactor_.release(places_);
}

void HttpReactor::acquire(HttpPlaces& places, const std::stop_token& stop) {
  MutexLock lock(mutex_);
  users_[&places].closed = false;
  if (take(places)) return;
  Waiter waiter{places};
  waiting_.push_back(&waiter);
  const auto has_place = [&]() REQUIRES_LOCK(mutex_) { return waiter.has_place; };
  if (waiter.changed.wait(mutex_, stop, has_place)) return;
  std::erase(waiting_, &waiter);
  throw Error(Errc::cancelled, "cancelled");
}

bool HttpReactor::take(HttpPlaces& places) {
  User& user = users_[&places];
  if (running_ >= places.most || user.running >= places.limit.get()) return false;
  ++running_;
  ++user.running;
  return true;
}

void HttpReactor::release(const HttpPlaces& places) noexcept {
  MutexLock lock(mutex_);
  --running_;
  User& user = users_[&places];
  if (--user.running == 0 && user.closed) forget(&places);
  std::erase_if(waiting_, [this](Waiter* waiter) REQUIRES_LOCK(mutex_) {
    if (!take(waiter->places)) return false;
    waiter->has_place = true;
    waiter->changed.notify_all();
    return true;
  });
}

void HttpReactor::close(const HttpPlaces& places) noexcept {
  MutexLock lock(mutex_);
  const auto user = users_.find(&places);
  if (user == users_.end()) return;
  user->second.closed = true;
  if (user->second.running == 0) forget(&places);
}

void HttpReactor::forget(const HttpPlaces* places) {
  users_.erase(places);
  last_closed_ = Clock::now();
  for (Worker& worker : workers_)
    if (worker.alive) curl_multi_wakeup(worker.multi);
}

void HttpReactor::start(HttpTransfer& transfer, unsigned most) {
  MutexLock lock(mutex_);
  const size_t threads = std::min<size_t>({kThreads, cpu_quota(), most});
  size_t chosen = 0;
  const auto room = [this](size_t i) {
    const Worker& worker = workers_[i];
    return static_cast<int>(worker.most + worker.paused) - static_cast<int>(worker.running);
  };
  for (size_t i = 0; i < threads; ++i) {
    workers_[i].most = static_cast<unsigned>((most + threads - 1 - i) / threads);
    if (room(i) > room(chosen)) chosen = i;
  }
  try {
    ensure_thread(chosen);
  } catch (const HttpFailure&) {
    const auto other = std::ranges::find(workers_, true, &Worker::alive);
    if (other == workers_.end()) throw;
    chosen = static_cast<size_t>(other - workers_.begin());
  }
  transfer.worker_ = chosen;
  ++workers_[chosen].running;
  post(workers_[chosen], {&transfer, Order::start});
}

void HttpReactor::send(HttpTransfer& transfer, Order order) {
  MutexLock lock(mutex_);
  post(workers_[transfer.worker_], {&transfer, order});
}

void HttpReactor::post(Worker& worker, Letter letter) {
  worker.inbox.push_back(letter);
  curl_multi_wakeup(worker.multi);
}

void HttpReactor::ensure_thread(size_t number) {
  Worker& worker = workers_[number];
  if (worker.alive) return;
  worker.job.join();  // it has ended, or needs no lock to end
  UniqueCurlMulti multi = new_curl_multi();
  // Without free descriptors libcurl makes no handle, or one that cannot be woken.
  if (!multi || curl_multi_wakeup(multi.get()) != CURLM_OK)
    throw HttpFailure{
        .reason = std::strerror(EMFILE), .hint = kTooManyFilesHint, .transient = true};
  worker.multi = multi.get();
  worker.inbox.clear();
  worker.running = worker.paused = 0;
  try {
    worker.job = ProcessPool::instance().start([this, number] { run(number); });
  } catch (const std::system_error& error) {
    throw HttpFailure{.reason = std::string("no thread for requests: ") + error.what(),
                      .transient = true};
  }
  (void)multi.release();  // the thread has it
  worker.alive = true;
}

void HttpReactor::run(size_t number) {
  const SigpipeGuard pipes;
  const BlockedSignals signals;
  Loop loop{.worker = workers_[number]};
  std::vector<Letter> letters;
  for (;;) {
    int wait_ms = kWaitMs;
    bool stopping = false;
    bool is_idle = false;
    bool is_late = false;
    {
      MutexLock lock(mutex_);
      if (!loop.multi) loop.multi.reset(loop.worker.multi);
      is_idle = loop.transfers.empty() && loop.worker.inbox.empty();
      const bool closed = loop.emptied < last_closed_;
      const Clock::time_point now = Clock::now();
      if (!is_idle) loop.worked = now;
      is_late = is_idle && closed && now - std::max(last_closed_, loop.worked) >= kUnused;
      if (is_idle && (stopping_ || (is_late && users_.empty()))) {
        loop.worker.alive = false;
        break;
      }
      letters.swap(loop.worker.inbox);
      loop.most = loop.worker.most;
      stopping = stopping_;
      if (is_idle && closed) wait_ms = static_cast<int>(kUnused.count() / 4);
    }
    if (is_late) end_idle_connections(loop);
    obey(loop, letters);
    letters.clear();
    while (stopping && !loop.transfers.empty())
      end(loop, *loop.transfers.back(), CURLE_ABORTED_BY_CALLBACK);
    perform(loop);
    if (!is_idle && loop.transfers.empty()) continue;  // it may be time for the end
    curl_multi_poll(loop.multi.get(), nullptr, 0, wait_ms, nullptr);
  }
}

// Connections of a source that was closed may never be used again. libcurl ends them with their
// handle.
void HttpReactor::end_idle_connections(Loop& loop) {
  UniqueCurlMulti fresh = new_curl_multi();
  if (!fresh || curl_multi_wakeup(fresh.get()) != CURLM_OK) return;  // see ensure_thread()
  MutexLock lock(mutex_);
  loop.emptied = Clock::now();
  loop.bound = 0;
  loop.worker.multi = fresh.get();
  loop.multi.swap(fresh);
  // The old one ends within the lock, so that no thread wakes it any more.
  fresh.reset();
}

void HttpReactor::obey(Loop& loop, const std::vector<Letter>& letters) {
  for (const auto& [transfer, order] : letters) {
    if (order == Order::start) {
      loop.transfers.push_back(transfer);
      set_bounds(loop);
      if (curl_multi_add_handle(loop.multi.get(), transfer->easy()) != CURLM_OK)
        end(loop, *transfer, CURLE_FAILED_INIT);
    } else if (std::ranges::find(loop.transfers, transfer) == loop.transfers.end()) {
      continue;  // it has ended meanwhile, and may not be there any more
    } else if (order == Order::cancel) {
      end(loop, *transfer, CURLE_ABORTED_BY_CALLBACK);
    } else if (std::exchange(transfer->paused_, false)) {
      const CURLcode code = curl_easy_pause(transfer->easy(), CURLPAUSE_CONT);
      if (code != CURLE_OK) end(loop, *transfer, code);
    }
  }
}

void HttpReactor::perform(Loop& loop) {
  int running = 0;
  if (curl_multi_perform(loop.multi.get(), &running) != CURLM_OK) {
    while (!loop.transfers.empty()) end(loop, *loop.transfers.back(), CURLE_FAILED_INIT);
    return;
  }
  int left = 0;
  while (CURLMsg* message = curl_multi_info_read(loop.multi.get(), &left)) {
    if (message->msg != CURLMSG_DONE) continue;
    const CURLcode code = message->data.result;
    const auto found = std::ranges::find(loop.transfers, message->easy_handle,
                                         [](HttpTransfer* transfer) { return transfer->easy(); });
    if (found != loop.transfers.end()) end(loop, **found, code);
  }
  set_bounds(loop);
}

// Paused bodies keep connections beyond the bound: they may be paused for as long as their readers
// like.
void HttpReactor::set_bounds(Loop& loop) {
  const auto paused = static_cast<unsigned>(std::ranges::count_if(
      loop.transfers, [](const HttpTransfer* transfer) { return transfer->paused_; }));
  if (paused != loop.paused) {
    MutexLock lock(mutex_);
    loop.paused = loop.worker.paused = paused;
  }
  const long bound = loop.most + static_cast<long>(paused);
  if (bound == loop.bound) return;
  loop.bound = bound;
  curl_multi_setopt(loop.multi.get(), CURLMOPT_MAX_TOTAL_CONNECTIONS, bound);
  curl_multi_setopt(loop.multi.get(), CURLMOPT_MAXCONNECTS, bound);
}

void HttpReactor::end(Loop& loop, HttpTransfer& transfer, CURLcode code) {
  curl_multi_remove_handle(loop.multi.get(), transfer.easy());
  std::erase(loop.transfers, &transfer);
  {
    MutexLock lock(mutex_);
    --loop.worker.running;
  }
  set_bounds(loop);
  transfer.ended(code);
}

void HttpReactor::shut_down() noexcept {
  std::array<ProcessJob, kThreads> jobs;
  {
    MutexLock lock(mutex_);
    stopping_ = true;
    for (size_t i = 0; i < kThreads; ++i) {
      if (workers_[i].alive) curl_multi_wakeup(workers_[i].multi);
      jobs[i] = std::exchange(workers_[i].job, {});
    }
  }
  for (const ProcessJob& job : jobs) job.join();
  MutexLock lock(mutex_);
  stopping_ = false;
}

}  // namespace tensorizer::io
