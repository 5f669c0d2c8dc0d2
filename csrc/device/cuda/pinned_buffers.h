// The staging memory of one CUDA device: a number of equal buffers with one event each, lent out
// one at a time, and the streams and events that loads and saves have no use for at the moment,
// kept for the next ones. Internally locked.
//
// Where memory cannot be pinned there is less of it, and in the end copies go through memory that
// is not pinned: slower, but a load never fails for want of it.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <stop_token>
#include <string>
#include <vector>

#include "core/sync.h"
#include "device/cuda/copy_stream.h"
#include "device/cuda/driver.h"
#include "device/cuda/kernel_module.h"
#include "device/host_mapping.h"

namespace tensorizer::device::cuda {

struct PinnedSettings {
  unsigned slots = 16;
  uint64_t slot_nbytes = 8ULL << 20;  // rounded up to whole 4096-byte pages
  // How long unused memory stays; 0 gives it back at once.
  std::chrono::milliseconds keep_idle{30'000};

  friend bool operator==(const PinnedSettings&, const PinnedSettings&) = default;
};

// Throws Error(invalid_argument) for sizes that make no sense.
void validate(const PinnedSettings& settings);

class PinnedBuffers {
 public:
  // Tries, in this order: memory of ours that the driver registers, memory that the driver
  // allocates, the same with fewer and smaller buffers, memory that is not pinned. Throws
  // Error(out_of_memory) or Error(device). REQUIRES: the device's context is current, here and in
  // the destructor.
  PinnedBuffers(const Driver& driver, Ordinal device, const PinnedSettings& wanted);
  ~PinnedBuffers();
  PinnedBuffers(const PinnedBuffers&) = delete;
  PinnedBuffers& operator=(const PinnedBuffers&) = delete;

  const PinnedSettings& wanted() const noexcept { return wanted_; }
  unsigned count() const noexcept { return static_cast<unsigned>(events_.size()); }
  uint64_t nbytes() const noexcept { return buffer_nbytes_; }
  bool is_pinned() const noexcept { return pinned_; }
  // Why there is less pinned memory than wanted; empty where there is not.
  const std::string& shortage() const noexcept { return shortage_; }

  std::span<std::byte> bytes(unsigned buffer) const noexcept {
    return {data_ + buffer * buffer_nbytes_, static_cast<size_t>(buffer_nbytes_)};
  }
  Event event(unsigned buffer) const noexcept { return events_[buffer]; }

  // A free buffer, if there is one and nobody waits for it.
  std::optional<unsigned> try_take();
  // Waits in line for one. nullopt when `stop` came, or `given_up` became true and wake_all() was
  // called.
  std::optional<unsigned> take(const std::stop_token& stop, const std::atomic<bool>& given_up);
  void give_back(unsigned buffer) noexcept;
  bool has_waiters() const noexcept { return waiters_.load(std::memory_order_relaxed) > 0; }
  void wake_all() noexcept;
  unsigned free_count() const;

  // For good: nobody gets a buffer any more, since a copy of one ended with `why`.
  void close(Result why) noexcept;
  // Success as long as they are open.
  Result closed_by() const;

  // REQUIRES: the device's context is current.
  std::unique_ptr<CopyStream> take_stream();
  void give_back(std::unique_ptr<CopyStream> stream) noexcept;
  Event take_event();

  // Made by the first call and tested; a device on which that failed is not asked again while its
  // memory lives. Throws Error(device). REQUIRES: the device's context is current.
  const Kernels& kernels();
  void give_back_event(Event event) noexcept;

 private:
  bool pin(unsigned slots, uint64_t slot_nbytes);
  void release() noexcept;

  const Driver& driver_;
  const Ordinal device_;
  const PinnedSettings wanted_;
  HostMapping mapping_;             // registered memory, or memory that is not pinned, or
  std::byte* allocated_ = nullptr;  // the driver's own
  std::byte* data_ = nullptr;
  uint64_t buffer_nbytes_ = 0;
  bool pinned_ = true;
  bool registered_ = false;
  std::string shortage_;
  std::vector<Event> events_;

  mutable Mutex mutex_;
  CondVar changed_;
  std::atomic<unsigned> waiters_{0};
  Result closed_by_ GUARDED_BY(mutex_) = kSuccess;
  // The last one returned goes out first: its cache lines are warm.
  std::vector<unsigned> free_ GUARDED_BY(mutex_);
  std::vector<std::unique_ptr<CopyStream>> idle_streams_ GUARDED_BY(mutex_);
  std::vector<Event> idle_events_ GUARDED_BY(mutex_);

  Mutex kernels_mutex_;  // held while the driver compiles
  std::unique_ptr<Kernels> kernels_ GUARDED_BY(kernels_mutex_);
  std::string kernels_refused_ GUARDED_BY(kernels_mutex_);  // why, where they were
};

}  // namespace tensorizer::device::cuda
