// Moves bytes between host staging slots and device memory. One engine per device and direction of
// a session.
//
// A host destination needs no engine: readers write to it directly. For a device, a worker leases a
// slot, fills it (read, decrypt, digest), and submits it with a list of pieces; the engine copies
// asynchronously, straight to the final addresses, and the slot returns to the ring when its copies
// are done. All methods are safe from many threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <stop_token>
#include <utility>

namespace tensorizer::device {

// `nbytes` from `slot_offset` in a slot to (or from) the device address.
struct CopyPiece {
  uint64_t slot_offset;
  std::byte* device_address;
  uint64_t nbytes;
};

// A stretch of device memory.
struct DeviceRange {
  std::byte* device_address;
  uint64_t nbytes;
};

class CopyEngine;

// One staging slot, on loan. Gives itself back to its engine when it dies unsubmitted.
class SlotLease {
 public:
  SlotLease() = default;
  SlotLease(CopyEngine* engine, unsigned slot, std::span<std::byte> bytes) noexcept
      : engine_(engine), slot_(slot), bytes_(bytes) {}
  SlotLease(SlotLease&& other) noexcept
      : engine_(std::exchange(other.engine_, nullptr)), slot_(other.slot_), bytes_(other.bytes_) {}
  SlotLease& operator=(SlotLease&& other) noexcept {
    std::swap(engine_, other.engine_);
    std::swap(slot_, other.slot_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~SlotLease();

  explicit operator bool() const noexcept { return engine_ != nullptr; }
  std::span<std::byte> bytes() const noexcept { return bytes_; }
  unsigned slot() const noexcept { return slot_; }
  void forget() noexcept { engine_ = nullptr; }

 private:
  CopyEngine* engine_ = nullptr;
  unsigned slot_ = 0;
  std::span<std::byte> bytes_;
};

class CopyEngine {
 public:
  virtual ~CopyEngine() = default;

  // Bytes of one slot: no unit may need more.
  virtual uint64_t slot_nbytes() const noexcept = 0;

  // Blocks until a slot is free. Throws Error(cancelled) on stop, Error(device) when an earlier
  // copy failed.
  virtual SlotLease acquire(const std::stop_token& stop) = 0;

  // Load: starts copying the pieces to the device; the slot is free again when they are done.
  // Returns at once.
  virtual void submit(SlotLease lease, std::span<const CopyPiece> pieces) = 0;

  // Save: copies the pieces from the device into the slot, ordered after the caller's stream, and
  // waits for them.
  virtual void fetch(const SlotLease& lease, std::span<const CopyPiece> pieces,
                     const std::stop_token& stop) = 0;

  // Returns when no copy touches the caller's memory any more; throws the first failure. Work that
  // the caller puts on its own stream afterwards sees the data.
  virtual void drain() = 0;

  // After a failure: drops copies that have not begun, waits for those that have, and for nothing
  // else. Then no copy touches the caller's memory any more. The other methods throw from now on.
  virtual void abandon() noexcept = 0;

  // After abandon(): overwrites destinations of a load with zeros and waits until they are. Writes
  // nothing where no copy had begun since the destinations were allocated; gives up, silently,
  // where the device takes no more orders: the first failure is on its way to the caller.
  virtual void wipe(std::span<const DeviceRange> destinations) noexcept = 0;

 private:
  friend class SlotLease;
  virtual void give_back(unsigned slot) noexcept = 0;
};

inline SlotLease::~SlotLease() {
  if (engine_) engine_->give_back(slot_);
}

}  // namespace tensorizer::device
