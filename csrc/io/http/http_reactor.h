// The threads that move all HTTP requests of this process: two at most, each with one multi handle
// of libcurl's, which keeps connections for the next request.
//
// All requests of the process together use at most HttpOptions::max_connections connections; a
// thread that wants to send a request waits for a place first, and threads get places in the order
// in which they came. A body that is paused between reads keeps its own connection beyond them.
// When a source or an uploader was closed and a thread of the reactor has had nothing to do for a
// fraction of a second since, it ends its idle connections; sources that are still open make new
// ones. The threads (of the pool of the process) start with the first request, and end in the same
// way once no source and no uploader is open. A forked child has a reactor of its own, without
// threads.
#pragma once

#include <curl/curl.h>

#include <array>
#include <chrono>
#include <deque>
#include <map>
#include <stop_token>
#include <vector>

#include "core/process_pool.h"
#include "core/sync.h"
#include "io/curl/curl_handle.h"
#include "io/http/connection_limit.h"

namespace tensorizer::io {

// One request as the reactor sees it. From HttpReactor::start() to ended() its handle belongs to
// one thread of the reactor.
class HttpTransfer {
 public:
  virtual ~HttpTransfer() = default;

 protected:
  HttpTransfer();

  CURL* easy() const noexcept { return easy_.get(); }
  // The transfer has left the reactor, which does not touch it after this call.
  virtual void ended(CURLcode code) noexcept = 0;
  // For callbacks of libcurl: the transfer takes no more bytes until HttpReactor::resume().
  void pause() noexcept { paused_ = true; }
  // In a child that was forked the handle is the parent's.
  void leave_to_parent() noexcept { (void)easy_.release(); }

 private:
  friend class HttpReactor;

  UniqueCurlEasy easy_;
  size_t worker_ = 0;
  bool paused_ = false;  // of the thread of the reactor
};

class HttpPlaces;

// Internally locked.
class HttpReactor {
 public:
  using Clock = std::chrono::steady_clock;

  // Of this process.
  static HttpReactor& of_process();

  HttpReactor() = default;
  HttpReactor(const HttpReactor&) = delete;
  HttpReactor& operator=(const HttpReactor&) = delete;

  // The transfer moves until ended() is called. `most`: connections of the process. Throws
  // HttpFailure where the system gives neither thread nor descriptors.
  void start(HttpTransfer& transfer, unsigned most);
  // Ends a pause(). REQUIRES: ended() was not called when this thread last looked.
  void resume(HttpTransfer& transfer) { send(transfer, Order::resume); }
  // Ends the transfer, unless it has ended; ended() is called in either case.
  void cancel(HttpTransfer& transfer) { send(transfer, Order::cancel); }

  // Stops the threads, before the process ends. Requests that are under way end with an error.
  void shut_down() noexcept;

 private:
  friend class HttpPlaces;
  friend class HttpPlace;

  enum class Order : uint8_t { start, resume, cancel };
  struct Letter {
    HttpTransfer* transfer;
    Order order;
  };
  struct Worker {
    // Guarded by the reactor's mutex.
    ProcessJob job;
    bool alive = false;
    CURLM* multi = nullptr;  // to be woken
    std::vector<Letter> inbox;
    unsigned running = 0;  // transfers
    unsigned paused = 0;   // of those
    unsigned most = 1;
  };
  struct User {
    unsigned running = 0;
    bool closed = false;
  };
  // The state of the thread of a worker.
  struct Loop {
    Worker& worker;
    UniqueCurlMulti multi = nullptr;
    std::vector<HttpTransfer*> transfers = {};
    unsigned paused = 0;
    long most = 1;   // connections, but for those of bodies that are paused
    long bound = 0;  // as libcurl knows it
    Clock::time_point worked = Clock::now();   // when it last had transfers
    Clock::time_point emptied = Clock::now();  // when its idle connections were ended
  };

  struct Waiter {
    HttpPlaces& places;
    CondVar changed;
    bool has_place = false;
  };

  void acquire(HttpPlaces& places, const std::stop_token& stop);
  bool take(HttpPlaces& places) REQUIRES_LOCK(mutex_);
  void release(const HttpPlaces& places) noexcept;
  void close(const HttpPlaces& places) noexcept;

  void send(HttpTransfer& transfer, Order order);
  void ensure_thread(size_t number) REQUIRES_LOCK(mutex_);
  void post(Worker& worker, Letter letter) REQUIRES_LOCK(mutex_);
  void forget(const HttpPlaces* places) REQUIRES_LOCK(mutex_);
  void run(size_t number);
  void end_idle_connections(Loop& loop);
  void obey(Loop& loop, const std::vector<Letter>& letters);
  void perform(Loop& loop);
  void set_bounds(Loop& loop);
  void end(Loop& loop, HttpTransfer& transfer, CURLcode code);

  static constexpr size_t kThreads = 2;

  Mutex mutex_;
  std::array<Worker, kThreads> workers_;
  std::map<const HttpPlaces*, User> users_ GUARDED_BY(mutex_);
  std::deque<Waiter*> waiting_
      GUARDED_BY(mutex_);                    // for a place; the first that may have one gets it
  unsigned running_ GUARDED_BY(mutex_) = 0;  // places
  Clock::time_point last_closed_ GUARDED_BY(mutex_){};  // when a source was
  bool stopping_ GUARDED_BY(mutex_) = false;
};

// Permission for one request, which the destructor gives back.
class HttpPlace {
 public:
  HttpPlace(HttpPlaces& places, const std::stop_token& stop);
  ~HttpPlace();
  HttpPlace(const HttpPlace&) = delete;
  HttpPlace& operator=(const HttpPlace&) = delete;

  ConnectionLimit::TimePoint begun() const noexcept { return begun_; }

 private:
  HttpReactor& reactor_;
  const HttpPlaces& places_;
  ConnectionLimit::TimePoint begun_;
};

// The share of one source or uploader in the reactor. Outlives its places. Safe from many threads.
class HttpPlaces {
 public:
  // `fixed`: see ConnectionLimit. `most_of_process`: requests at the same time, those of all other
  // sources and uploaders included.
  HttpPlaces(unsigned fixed, unsigned most_of_process)
      : most(std::max(1u, most_of_process)), limit(fixed, most_of_process) {}
  ~HttpPlaces() { close(); }
  HttpPlaces(const HttpPlaces&) = delete;
  HttpPlaces& operator=(const HttpPlaces&) = delete;

  // The reactor need not keep connections for this one any more. Later requests open new ones.
  void close() noexcept { HttpReactor::of_process().close(*this); }

  const unsigned most;
  ConnectionLimit limit;
};

}  // namespace tensorizer::io
