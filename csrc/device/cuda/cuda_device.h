// One CUDA device of this process: its primary context and its pinned memory.
//
// A Device is never destroyed: at exit the driver may be gone before our statics. What it holds is
// given back when nobody has used the pinned memory for a while, or on request.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/process_pool.h"
#include "core/sync.h"
#include "device/cuda/context_guard.h"
#include "device/cuda/driver.h"
#include "device/cuda/pinned_buffers.h"

namespace tensorizer::device::cuda {

struct PinnedStatus {
  bool present = false;
  unsigned users = 0;
  unsigned slots = 0;
  unsigned free_slots = 0;
  uint64_t slot_nbytes = 0;
};

// Whether encrypted chunks are opened by the device: never; where its kernels work, else by the
// host; or such a load fails without them. They are made by the first load that has use for them.
enum class OpenOnDevice : uint8_t { never, if_possible, always };

class Device {
 public:
  // The device with that ordinal, counted as CUDA_VISIBLE_DEVICES leaves them. Throws
  // Error(device).
  static Device& get(Ordinal ordinal);

  const Driver& driver() const noexcept { return driver_; }
  Ordinal ordinal() const noexcept { return ordinal_; }
  std::string label() const { return "CUDA device " + std::to_string(ordinal_); }

  // Whether its memory is that of the host, as on GB10, GB200 and Jetson: what the host keeps of a
  // file is then missing for models. Throws Error(device).
  bool shares_host_memory() const;

  // The pinned memory, made if there is none. While it is shared, later users get it as it
  // is; when unused and another size is wanted, it is replaced. It counts as used until the last
  // pointer is gone; no context needs to be current.
  std::shared_ptr<PinnedBuffers> use_pinned(const PinnedSettings& settings);

  // Stays valid as long as the pinned memory is in use. REQUIRES: it is.
  Context context() const;

  // Frees the pinned memory now, or when its last user ends; true when it is gone on return.
  bool release_pinned();
  static bool release_all();

  // The device may still write to this memory and nobody can tell when that ends, since waiting for
  // it ended with `why`: it is never used again and never returned.
  void condemn(const PinnedBuffers& buffers, Result why);

  PinnedStatus status() const;

  SelfTestRecord& kernels_tested() noexcept { return kernels_tested_; }

  // No job waits for idle memory after this. For the end of the process.
  static void stop_idle_waits() noexcept;

 private:
  Device(const Driver& driver, Ordinal ordinal) : driver_(driver), ordinal_(ordinal) {}

  void make_pinned(const PinnedSettings& settings) REQUIRES_LOCK(mutex_);
  void free_pinned() REQUIRES_LOCK(mutex_);
  void end_use(PinnedBuffers* buffers) noexcept;
  void start_idle_wait() REQUIRES_LOCK(mutex_);
  void wait_until_idle();
  void stop_idle_wait() noexcept;

  const Driver& driver_;
  const Ordinal ordinal_;
  SelfTestRecord kernels_tested_;
  mutable Mutex mutex_;
  CondVar changed_;
  Context context_ GUARDED_BY(mutex_) = nullptr;
  std::unique_ptr<PinnedBuffers> pinned_ GUARDED_BY(mutex_);
  std::vector<std::unique_ptr<PinnedBuffers>> condemned_ GUARDED_BY(mutex_);  // kept for good
  unsigned users_ GUARDED_BY(mutex_) = 0;
  bool release_wanted_ GUARDED_BY(mutex_) = false;
  uint64_t uses_ GUARDED_BY(mutex_) =
      0;  // counts use_pinned() calls: tells an idle period from the next
  bool waits_until_idle_ GUARDED_BY(mutex_) = false;
  bool process_ends_ GUARDED_BY(mutex_) = false;
  ProcessJob idle_wait_ GUARDED_BY(mutex_);
};

}  // namespace tensorizer::device::cuda
