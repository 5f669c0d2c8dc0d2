// The CopyEngine of a CUDA device: the process's ring of pinned slots, a stream of its own,
// asynchronous copies straight to the final addresses.
//
// Order: copies run after what the caller's stream held when the engine was made, or when
// order_after_caller() was last called before their submit(); the caller's stream is told to wait
// for all copies in drain(). Call order_after_caller() once destinations are allocated: the
// allocator may hand out memory that earlier work on the caller's stream still uses. Nothing but
// event waits and records touches the caller's stream.
//
// One engine is one load or save on one device; engines of one device share the ring. Internally
// locked. After a drain() that returned it may be used again. A child forked meanwhile may destroy
// its copy, and nothing else.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>

#include "device/copy_engine.h"
#include "device/cuda/cuda_device.h"

namespace tensorizer::device::cuda {

struct CudaCopyOptions {
  Ordinal device = 0;
  uintptr_t caller_stream = 0;  // CUstream as a number, as torch gives it; 0 is the default stream
  RingSettings ring;
  bool scatter_kernel = false;  // off until it has been compared on the device at hand
};

class CopyPump;

class CudaCopyEngine final : public CopyEngine {
 public:
  // Throws Error(device), Error(out_of_memory) for memory that cannot be pinned,
  // Error(invalid_argument) for sizes out of range or a caller's stream that is capturing a graph.
  explicit CudaCopyEngine(const CudaCopyOptions& options);

  // Drops copies that have not begun and waits for those that have: afterwards none touches the
  // caller's memory. REQUIRES: no lease of it is alive.
  ~CudaCopyEngine() override;

  uint64_t slot_nbytes() const noexcept override;
  SlotLease acquire(const std::stop_token& stop) override;
  void submit(SlotLease lease, std::span<const CopyPiece> pieces) override;
  void fetch(const SlotLease& lease, std::span<const CopyPiece> pieces,
             const std::stop_token& stop) override;
  void drain() override;
  void abandon() noexcept override;
  void wipe(std::span<const DeviceRange> destinations) noexcept override;

  // Copies submitted from now on run after what is on the caller's stream now.
  void order_after_caller();

  // Drops copies that have not begun; acquire, submit, fetch and drain throw Error(cancelled) from
  // now on. Does not wait: drain() and the destructor do.
  void cancel() noexcept;

 private:
  void give_back(unsigned slot) noexcept override;
  CopyPump& pump() const;

  const pid_t owner_;
  std::unique_ptr<CopyPump> pump_;
};

// Gives a device's ring back, now or when its last user ends; true when it is gone on return, also
// if there was none.
// Neither this nor the next two initialise the driver.
bool release_ring(Ordinal device);
bool release_all_rings();

RingStatus ring_status(Ordinal device);

// True where the build compiled kernels: without them, scatter_kernel is an Error(device).
bool has_kernels() noexcept;

// For the end of the process: cancels what is in flight, waits a short while for it, and ends idle
// threads.
void shut_down() noexcept;

}  // namespace tensorizer::device::cuda
