// What loads and saves of one CUDA device share: its staging memory, a number of equal buffers with
// one event each that are lent out one at a time; the streams that copy from and to them; the
// kernels. Internally locked.
//
// Staging memory is made in blocks, by a thread that finds no free buffer, up to the size that was
// asked for: a small load pins little, and a large one copies while more is pinned. Where memory
// cannot be pinned there is less of it, and in the end copies go through memory that is not pinned:
// slower, but a load never fails for want of it.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <stop_token>
#include <string>
#include <vector>

#include "core/process_pool.h"
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
  // Makes the first block. Tries, in this order: memory of ours that the driver registers, memory
  // that the driver allocates, the same with fewer and smaller buffers, memory that is not pinned.
  // `tested` is of the device's kernels, and outlives this. Throws Error(out_of_memory) or
  // Error(device). REQUIRES: the device's context is current, here and in the destructor.
  PinnedBuffers(const Driver& driver, Ordinal device, Context context, const PinnedSettings& wanted,
                SelfTestRecord& tested);
  ~PinnedBuffers();
  PinnedBuffers(const PinnedBuffers&) = delete;
  PinnedBuffers& operator=(const PinnedBuffers&) = delete;

  const PinnedSettings& wanted() const noexcept { return wanted_; }
  // Buffers there may be.
  unsigned most() const noexcept { return most_; }
  // Those there are.
  unsigned count() const;
  uint64_t nbytes() const noexcept { return buffer_nbytes_; }
  // Why there is less pinned memory than wanted; empty where there is not.
  std::string shortage() const;

  std::span<std::byte> bytes(unsigned buffer) const noexcept {
    return {buffers_[buffer], static_cast<size_t>(buffer_nbytes_)};
  }
  Event event(unsigned buffer) const noexcept { return events_[buffer]; }

  // A free buffer, if there is one and nobody waits for it; makes some where there may be more.
  // REQUIRES: the device's context is current.
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

  static constexpr unsigned kStreams = 4;
  static unsigned stream_of(unsigned buffer) noexcept { return buffer % kStreams; }

  // Calls fn(stream) with the stream that copies from and to the buffer, which is this thread's
  // meanwhile. A few streams serve all buffers: with more of them kernels of one buffer would not
  // hold up copies of the next any less. REQUIRES: the device's context is current.
  template <class Fn>
  void on_stream(unsigned buffer, Fn&& fn) {
    SharedStream& shared = streams_[stream_of(buffer)];
    MutexLock lock(shared.mutex);
    fn(*shared.stream);
  }

  // REQUIRES: the device's context is current.
  Event take_event();
  void give_back_event(Event event) noexcept;

  // Begins to make the kernels as a job of the process, unless somebody has: the driver may compile
  // for longer than a load takes.
  void start_kernels();
  // The kernels where they are made and tested; null where they are not yet. Throws Error(device)
  // where they cannot be had, as long as this memory lives.
  const Kernels* kernels_now() const;
  // The same, waiting for them; starts them. Throws Error(cancelled).
  const Kernels* kernels(const std::stop_token& stop);

 private:
  struct SharedStream {
    Mutex mutex;
    std::unique_ptr<CopyStream> stream GUARDED_BY(mutex);
  };
  struct Block {
    std::byte* data;
    bool registered;  // memory of mapping_; else the driver's own
  };

  void set_free(unsigned first, uint64_t wanted_nbytes);
  bool pin(unsigned first, unsigned count, uint64_t slot_nbytes);
  bool grow();
  void release() noexcept;
  void make_kernels() noexcept;

  const Driver& driver_;
  const Ordinal device_;
  const Context context_;
  const PinnedSettings wanted_;
  SelfTestRecord& tested_;
  Pages mapping_;  // registered block by block, or memory that is not pinned
  uint64_t buffer_nbytes_ = 0;
  unsigned most_ = 0;
  bool pinned_ = true;
  bool registers_ = false;           // else blocks are allocated by the driver
  std::vector<std::byte*> buffers_;  // `most_` of them; null before their block
  std::vector<Event> events_;
  std::atomic<bool> batches_{false};
  std::array<SharedStream, kStreams> streams_;

  mutable Mutex mutex_;
  CondVar changed_;
  std::atomic<unsigned> waiters_{0};
  Result closed_by_ GUARDED_BY(mutex_) = kSuccess;
  // The last one returned goes out first: its cache lines are warm.
  std::vector<unsigned> free_ GUARDED_BY(mutex_);
  std::vector<Event> idle_events_ GUARDED_BY(mutex_);
  std::vector<Block> blocks_ GUARDED_BY(mutex_);
  unsigned begun_ GUARDED_BY(mutex_) = 0;  // buffers of blocks that somebody has begun
  unsigned made_ GUARDED_BY(mutex_) = 0;
  unsigned growing_ GUARDED_BY(mutex_) = 0;
  std::string shortage_ GUARDED_BY(mutex_);

  mutable Mutex kernels_mutex_;
  CondVar kernels_changed_;
  bool kernels_begun_ GUARDED_BY(kernels_mutex_) = false;
  std::unique_ptr<Kernels> kernels_ GUARDED_BY(kernels_mutex_);
  std::string kernels_refused_ GUARDED_BY(kernels_mutex_);  // why, where they were
  ProcessJob kernels_job_ GUARDED_BY(kernels_mutex_);
};

}  // namespace tensorizer::device::cuda
