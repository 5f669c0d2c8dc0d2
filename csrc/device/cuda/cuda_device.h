// One CUDA device of this process: its primary context, its ring of pinned slots, its kernels.
//
// A Device is never destroyed: at exit the driver may be gone before our statics. What it holds is
// given back when nobody has used the ring for a while, or on request.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "core/sync.h"
#include "device/cuda/driver.h"
#include "device/slot_ring.h"

namespace tensorizer::device::cuda {

struct RingSettings {
  unsigned slots = 16;
  uint64_t slot_nbytes = 8ULL << 20;  // rounded up to whole 4096-byte pages
  std::chrono::milliseconds keep_idle{
      30'000};  // how long an unused ring stays; 0 gives it back at once

  friend bool operator==(const RingSettings&, const RingSettings&) = default;
};

// Throws Error(invalid_argument) for sizes that make no sense.
void validate(const RingSettings& settings);

// Makes a device's primary context current for this thread, and its driver calls invisible to a
// stream capture that some other thread may be running. Confined to one thread.
class ContextGuard {
 public:
  ContextGuard(const Driver& driver, Context context);
  ~ContextGuard();
  ContextGuard(const ContextGuard&) = delete;
  ContextGuard& operator=(const ContextGuard&) = delete;

 private:
  const Driver& driver_;
  int capture_mode_;
};

// Pinned slots with one event each, and a table per slot that kernels read. Slots are internally
// locked; the rest is immutable. REQUIRES: the device's context is current wherever one is made or
// destroyed.
class PinnedRing {
 public:
  // Throws Error(out_of_memory) or Error(device).
  PinnedRing(const Driver& driver, Ordinal device, const RingSettings& settings);
  ~PinnedRing();
  PinnedRing(const PinnedRing&) = delete;
  PinnedRing& operator=(const PinnedRing&) = delete;

  static constexpr uint64_t kTableNbytes = 64 << 10;

  const RingSettings& settings() const noexcept { return settings_; }
  SlotRing& slots() noexcept { return *slots_; }
  Event event(unsigned slot) const noexcept { return events_[slot]; }
  std::byte* table(unsigned slot) const noexcept { return tables_ + slot * kTableNbytes; }

 private:
  void pin(uint64_t nbytes);
  void unpin() noexcept;

  const Driver& driver_;
  const Ordinal device_;
  const RingSettings settings_;
  HostMapping mapping_;             // registered memory, or
  std::byte* allocated_ = nullptr;  // the driver's own, where it registers none
  std::byte* tables_ = nullptr;
  std::vector<Event> events_;
  std::unique_ptr<SlotRing> slots_;
};

struct RingStatus {
  bool present = false;
  unsigned users = 0;
  unsigned slots = 0;
  unsigned free_slots = 0;
  uint64_t slot_nbytes = 0;
};

class Device {
 public:
  // The device with that ordinal, counted as CUDA_VISIBLE_DEVICES leaves them. Throws
  // Error(device).
  static Device& get(Ordinal ordinal);

  const Driver& driver() const noexcept { return driver_; }
  Ordinal ordinal() const noexcept { return ordinal_; }
  std::string label() const { return "CUDA device " + std::to_string(ordinal_); }

  // The ring, made if there is none. While it is shared, whoever comes later gets it as it is; an
  // unused one of another size is replaced. It counts as used until the last pointer is gone; no
  // context needs to be current.
  std::shared_ptr<PinnedRing> use_ring(const RingSettings& settings);

  // Stays valid as long as the ring is in use. REQUIRES: it is.
  Context context() const;

  // The function of the embedded kernels, loaded on first use. REQUIRES: ring in use, context
  // current.
  Function kernel(const char* name);

  // Frees the ring now, or when its last user ends; true when it is gone on return.
  bool release_ring();
  static bool release_all();

  // The ring may still be written to by the device and nobody can tell when that ends: it is never
  // used again and its memory never returned.
  void condemn_ring(const PinnedRing& ring);

  RingStatus status() const;

  // No thread of ours waits for idle rings after this. For the end of the process.
  static void stop_idle_threads() noexcept;

 private:
  Device(const Driver& driver, Ordinal ordinal) : driver_(driver), ordinal_(ordinal) {}

  void make_ring(const RingSettings& settings) REQUIRES_LOCK(mutex_);
  void free_ring() REQUIRES_LOCK(mutex_);
  void end_use(PinnedRing* ring) noexcept;
  void start_idle_wait() REQUIRES_LOCK(mutex_);
  void wait_until_idle(const std::stop_token& stop);
  void stop_idle_thread() noexcept;

  const Driver& driver_;
  const Ordinal ordinal_;
  mutable Mutex mutex_;
  CondVar changed_;
  Context context_ GUARDED_BY(mutex_) = nullptr;
  std::unique_ptr<PinnedRing> ring_ GUARDED_BY(mutex_);
  Module kernels_ GUARDED_BY(mutex_) = nullptr;
  unsigned users_ GUARDED_BY(mutex_) = 0;
  bool release_wanted_ GUARDED_BY(mutex_) = false;
  uint64_t uses_ GUARDED_BY(mutex_) =
      0;  // counts use_ring() calls: tells an idle period from the next
  bool idle_thread_runs_ GUARDED_BY(mutex_) = false;
  bool process_ends_ GUARDED_BY(mutex_) = false;
  std::jthread idle_thread_ GUARDED_BY(mutex_);
};

}  // namespace tensorizer::device::cuda
