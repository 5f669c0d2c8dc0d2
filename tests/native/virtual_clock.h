// Time that passes only while somebody sleeps in it.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>

#include "core/error.h"
#include "io/retry.h"

namespace tensorizer::io {

// Safe from many threads.
class VirtualClock {
 public:
  VirtualClock() {
    clock.now = [this] { return RetryClock::TimePoint(elapsed()); };
    clock.chance = [] { return 0.999999; };  // the longest delays
    clock.sleep = [this](std::chrono::milliseconds delay, const std::stop_token& stop) {
      throw_if_stopped(stop);
      elapsed_ms_.fetch_add(delay.count());
      longest_ms_ = std::max<int64_t>(longest_ms_, delay.count());
    };
  }
  VirtualClock(const VirtualClock&) = delete;
  VirtualClock& operator=(const VirtualClock&) = delete;

  std::chrono::milliseconds elapsed() const {
    return std::chrono::milliseconds(elapsed_ms_.load());
  }
  void pass(std::chrono::milliseconds time) { elapsed_ms_.fetch_add(time.count()); }
  std::chrono::milliseconds longest_delay() const {
    return std::chrono::milliseconds(longest_ms_.load());
  }

  RetryClock clock;

 private:
  std::atomic<int64_t> elapsed_ms_{0};
  std::atomic<int64_t> longest_ms_{0};
};

}  // namespace tensorizer::io
