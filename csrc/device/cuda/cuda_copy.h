// The CopyEngine of a CUDA device: copiers over the process's pinned memory, asynchronous copies
// straight to the final addresses.
//
// Order: copies run after what the caller's stream held when the engine was made, or when
// order_after_caller() was last called: each copier waits for that on the host before its first
// copy, so nothing of ours ever sits behind work of the caller that may take minutes. Call
// order_after_caller() once destinations are allocated: the allocator may hand out memory that
// earlier work on the caller's stream still uses. A load is over when its copies are done, so what
// the caller does next sees the data. Nothing but an event is put on the caller's stream.
//
// One engine is one load or save on one device; engines of one device share its pinned memory. It
// may be used again. A child forked meanwhile may destroy its copy, and nothing else.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "core/fork.h"
#include "device/copy_engine.h"
#include "device/cuda/cuda_device.h"

namespace tensorizer::device::cuda {

struct CudaCopyOptions {
  Ordinal device = 0;
  uintptr_t caller_stream = 0;  // CUstream as a number, as torch gives it; 0 is the default stream
  PinnedSettings pinned;
  OpenOnDevice open_on_device = OpenOnDevice::never;
};

struct CopierState;

class CudaCopyEngine final : public CopyEngine {
 public:
  // Throws Error(device), Error(out_of_memory), Error(invalid_argument) for sizes out of range or a
  // caller's stream that is capturing a graph.
  explicit CudaCopyEngine(const CudaCopyOptions& options);

  // REQUIRES: its copiers are gone.
  ~CudaCopyEngine() override;

  uint64_t buffer_nbytes() const noexcept override;
  bool is_ready() const noexcept override;
  void order_after_caller() override;
  std::unique_ptr<Copier> make_copier(bool secret) override;
  void wipe(std::span<const DeviceRange> destinations) noexcept override;

  // Every wait of its copiers ends in Error(cancelled) from now on. Does not wait for them.
  void cancel() noexcept;
  // Waits until its copiers are gone, or `patience` is over.
  void wait_for_copiers(std::chrono::milliseconds patience) noexcept;

  // Why the host opens chunks; empty where the device does. Waits for the kernels, which are made
  // if nobody has yet. Throws Error(cancelled).
  std::string why_not_opened(const std::stop_token& stop);

  // What the device's kernels gave wrong when they were tested; empty where they did not, or were
  // not tested.
  std::string found_wrong() const;

  // Why there is less pinned memory than was asked for; empty where there is not.
  std::string shortage() const;

 private:
  CopierState& state() const;

  const OwnerProcess owner_;
  const Stream caller_;
  std::unique_ptr<CopierState> state_;
};

// Gives a device's pinned memory back, now or when its last user ends; true when it is gone on
// return, also if there was none.
// Neither this nor the next two initialise the driver.
bool release_pinned(Ordinal device);
bool release_all_pinned();

PinnedStatus pinned_status(Ordinal device);

// For the end of the process: cancels what is in flight, waits a short while for it, and ends idle
// threads.
void shut_down() noexcept;

}  // namespace tensorizer::device::cuda
