// How many requests of one source run at the same time: a fixed number, or 16, or 64 for a server
// whose first answer took 10 ms or longer. A server that says that it is overloaded (429, 503) gets
// half as many for the life of the source. Internally locked.
#pragma once

#include <algorithm>
#include <chrono>

#include "core/sync.h"

namespace tensorizer::io {

class ConnectionLimit {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;

  // `fixed` if not zero; never more than `most`.
  ConnectionLimit(unsigned fixed, unsigned most) noexcept
      : most_(std::max(1u, most)),
        fixed_(fixed > 0),
        limit_(std::min(fixed > 0 ? fixed : kNear, most_)) {}

  unsigned get() const {
    MutexLock lock(mutex_);
    return limit_;
  }

  void fix(unsigned count) {
    MutexLock lock(mutex_);
    fixed_ = true;
    limit_ = std::clamp(count, 1u, most_);
  }

  // Of the request that opened the source, before any other.
  void note_first_answer(std::chrono::duration<double> latency) {
    MutexLock lock(mutex_);
    if (!fixed_) limit_ = std::min(latency >= kFarLatency ? kFar : kNear, most_);
  }

  // A request that began at `begun` was refused at `now`. One overload makes many requests fail;
  // those that began before the limit changed say no more.
  void note_overload(TimePoint begun, TimePoint now) {
    MutexLock lock(mutex_);
    if (fixed_ || begun < changed_) return;
    limit_ = std::max(1u, limit_ / 2);
    changed_ = now;
  }

 private:
  static constexpr unsigned kNear = 16;
  // Object stores answer after 10 to 100 ms and bound the rate of a connection: with 32, a load of
  // benchmarks' http-object-store (20 ms, 80 MB/s) took 1.4 times as long.
  static constexpr unsigned kFar = 64;
  static constexpr std::chrono::milliseconds kFarLatency{10};

  const unsigned most_;
  mutable Mutex mutex_;
  bool fixed_ GUARDED_BY(mutex_);
  unsigned limit_ GUARDED_BY(mutex_);
  TimePoint changed_ GUARDED_BY(mutex_){};
};

}  // namespace tensorizer::io
