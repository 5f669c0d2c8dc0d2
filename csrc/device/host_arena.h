// Host memory for loaded tensors, and the memory that earlier tensors have left.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <utility>

#include "core/pages.h"

namespace tensorizer::device {

// Anonymous pages, huge where the system offers them, faulted in by the thread that writes first.
// Immutable handle; the bytes belong to the writers.
class HostArena {
 public:
  // Zeros, which go back to the system with the arena. Throws Error(out_of_memory) naming the size.
  static std::shared_ptr<HostArena> create(uint64_t nbytes);

  // Any content: memory that tensors before these have left, where there is some (see KeptMemory);
  // and it is left to those that follow. For what is no secret.
  static std::shared_ptr<HostArena> recycle(uint64_t nbytes);

  HostArena(Pages pages, uint64_t nbytes, bool recycled) noexcept
      : pages_(std::move(pages)), nbytes_(nbytes), recycled_(recycled) {}
  ~HostArena();
  HostArena(const HostArena&) = delete;
  HostArena& operator=(const HostArena&) = delete;

  std::span<std::byte> bytes() const noexcept { return {pages_.get(), nbytes_}; }

 private:
  Pages pages_;
  uint64_t nbytes_;
  bool recycled_;
};

// Memory of arenas that are gone, kept for the next load of the process: pages that are there
// already take data three times as fast as pages that the system has to make first. The system may
// take kept pages at any time (MADV_FREE), and those that nobody took within a while are given back
// when more is kept. Internally locked; one for the process, never destroyed. A forked child starts
// with nothing.
class KeptMemory {
 public:
  static KeptMemory& instance();

  // Keeps at most so many bytes, each for so long after it was given; 0 of either: nothing, and
  // what is kept is given back now. Keeps nothing before the first call.
  void configure(uint64_t max_nbytes, std::chrono::milliseconds idle);

  // At least `nbytes` in whole huge pages, with any content. Empty where there are none.
  Pages take(uint64_t nbytes) noexcept;

  // Keeps whole huge pages, or frees them where they are not wanted.
  void give(Pages pages) noexcept;

  uint64_t nbytes() const noexcept;

 private:
  using Clock = std::chrono::steady_clock;
  struct Kept {
    Pages pages;
    Clock::time_point until;
  };

  KeptMemory();
  // Gives back what is due, and the oldest until `room` bytes more may be kept.
  void drop(uint64_t room = 0) noexcept;

  // Not core/sync.h: held across fork().
  mutable std::mutex mutex_;
  std::deque<Kept> kept_;  // oldest first
  uint64_t nbytes_ = 0;
  uint64_t max_nbytes_ = 0;
  std::chrono::milliseconds idle_{0};
};

}  // namespace tensorizer::device
