// std::mutex with clang's thread-safety annotations: members marked GUARDED_BY are checked by
// -Wthread-safety. A forked child finds every lock free, and every condition without waiters.
#pragma once

#include <condition_variable>
#include <mutex>
#include <stop_token>
#include <utility>

#include "core/fork.h"

#if defined(__clang__)
#define TZR_TSA(x) __attribute__((x))
#else
#define TZR_TSA(x)
#endif
#define GUARDED_BY(x) TZR_TSA(guarded_by(x))
#define REQUIRES_LOCK(...) TZR_TSA(requires_capability(__VA_ARGS__))

namespace tensorizer {

class TZR_TSA(capability("mutex")) Mutex {
 public:
  void lock() TZR_TSA(acquire_capability()) { mutex_->lock(); }
  bool try_lock() TZR_TSA(try_acquire_capability(true)) { return mutex_->try_lock(); }
  void unlock() TZR_TSA(release_capability()) {
    // A thread that held it at the fork does not exist in the child.
    if (std::mutex* mutex = mutex_.current()) mutex->unlock();
  }

 private:
  FreshInChild<std::mutex> mutex_;
};

class TZR_TSA(scoped_lockable) MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) TZR_TSA(acquire_capability(mutex)) : mutex_(mutex) {
    mutex_.lock();
  }
  // Of a mutex that this thread has locked.
  MutexLock(Mutex& mutex, std::adopt_lock_t /*unused*/) TZR_TSA(requires_capability(mutex))
      : mutex_(mutex) {}
  ~MutexLock() TZR_TSA(release_capability()) { mutex_.unlock(); }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

 private:
  Mutex& mutex_;
};

// Waits on a Mutex held by a MutexLock; every wait also ends when the stop token asks for it.
class CondVar {
 public:
  void notify_one() noexcept { cv_->notify_one(); }
  void notify_all() noexcept { cv_->notify_all(); }

  // REQUIRES: mutex is held. Returns false if the stop came before the predicate held.
  template <class Predicate>
  bool wait(Mutex& mutex, std::stop_token stop, Predicate predicate) REQUIRES_LOCK(mutex) {
    return cv_->wait(mutex, std::move(stop), predicate);
  }
  // The same with a deadline; false on stop or timeout with the predicate still unmet.
  template <class Predicate, class Clock, class Duration>
  bool wait_until(Mutex& mutex, std::stop_token stop,
                  std::chrono::time_point<Clock, Duration> deadline, Predicate predicate)
      REQUIRES_LOCK(mutex) {
    return cv_->wait_until(mutex, std::move(stop), deadline, predicate);
  }

 private:
  FreshInChild<std::condition_variable_any> cv_;
};

}  // namespace tensorizer
