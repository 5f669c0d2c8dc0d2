// Memory of tensors that are gone, kept for the next load of the process: pages that are there
// already take data three times as fast as pages that the system has to make first. The kernel may
// take kept pages at any time (MADV_FREE). Internally locked; one for the process, never destroyed.
//
// A thread of its own gives back what was not used again for a while; it runs while there is
// something to give back, never longer than that while at the end of the process, and touches
// nothing but this object. A forked child starts with nothing.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <thread>

namespace tensorizer::device {

// Whole pages, aligned for huge ones.
struct Region {
  std::byte* data = nullptr;
  uint64_t nbytes = 0;
};

class KeptMemory {
 public:
  static KeptMemory& instance();

  // Keeps at most so many bytes, each for so long after it was given; 0 of either: nothing, and
  // what is kept is given back now. Keeps nothing before the first call.
  void configure(uint64_t max_nbytes, std::chrono::milliseconds idle);

  // A region of exactly `nbytes`, a multiple of huge pages, with any content; data is null where
  // there is none.
  Region take(uint64_t nbytes) noexcept;

  // Takes a region over; false: it is not wanted, and stays the caller's. Unmaps nothing: tensors
  // are freed below the interpreter lock, and large regions take long.
  bool give(Region region) noexcept;

  uint64_t nbytes() const noexcept;

 private:
  using Clock = std::chrono::steady_clock;
  struct Kept {
    Region region;
    Clock::time_point until;
  };

  KeptMemory();
  Region take_oldest() noexcept;
  bool is_due() const noexcept;
  void watch() noexcept;
  void ensure_watched();

  // Not core/sync.h: held across fork().
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Kept> kept_;  // oldest first
  uint64_t nbytes_ = 0;
  uint64_t max_nbytes_ = 0;
  std::chrono::milliseconds idle_{0};
  bool watched_ = false;
  std::thread watcher_;
};

}  // namespace tensorizer::device
