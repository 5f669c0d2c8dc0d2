// A fixed number of equal staging slots over one page-aligned mapping, lent out one at a time.
// Internally locked.
//
// The memory is faulted in by several threads and kept from forked children: pinned pages must not
// be copied on write, and a child has no use for them. What pins the pages (a driver) is not known
// here.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <stop_token>
#include <vector>

#include "core/sync.h"

namespace tensorizer::device {

// Anonymous memory of process-wide use. Confined to one thread while it is being made; then
// immutable.
class HostMapping {
 public:
  HostMapping() = default;
  // Maps `nbytes`, on `numa_node` where the system grants it (-1: anywhere), and faults it in with
  // `threads` threads. Throws Error(out_of_memory).
  HostMapping(uint64_t nbytes, int numa_node, unsigned threads);
  HostMapping(HostMapping&& other) noexcept;
  HostMapping& operator=(HostMapping&& other) noexcept;
  ~HostMapping();

  std::byte* data() const noexcept { return data_; }
  uint64_t nbytes() const noexcept { return nbytes_; }

 private:
  std::byte* data_ = nullptr;
  uint64_t nbytes_ = 0;
};

class SlotRing {
 public:
  SlotRing(std::byte* data, unsigned slots, uint64_t slot_nbytes);

  unsigned slots() const noexcept { return slots_; }
  uint64_t slot_nbytes() const noexcept { return slot_nbytes_; }
  std::span<std::byte> bytes(unsigned slot) const noexcept {
    return {data_ + slot * slot_nbytes_, static_cast<size_t>(slot_nbytes_)};
  }

  // Waits for a free slot. nullopt when `stop` came, when the ring was closed, or when `broken`
  // became true and wake_all() was called.
  std::optional<unsigned> take(const std::stop_token& stop, const std::atomic<bool>& broken);

  void give_back(unsigned slot) noexcept;
  void wake_all() noexcept;
  unsigned free_slots() const;

  // For good: nobody gets a slot any more.
  void close() noexcept;
  bool closed() const;

 private:
  std::byte* const data_;
  const unsigned slots_;
  const uint64_t slot_nbytes_;
  mutable Mutex mutex_;
  CondVar changed_;
  bool closed_ GUARDED_BY(mutex_) = false;
  std::vector<unsigned> free_
      GUARDED_BY(mutex_);  // the last one returned goes out first: its cache lines are warm
};

}  // namespace tensorizer::device
