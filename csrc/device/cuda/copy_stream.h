// How copies get onto a CUDA stream: adjacent pieces as one, many small ones in one call.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "device/copy_engine.h"
#include "device/cuda/driver.h"

namespace tensorizer::device::cuda {

enum class Direction : uint8_t { to_device, to_host };

// Between host memory and the device.
struct Copy {
  std::byte* host;
  DevicePointer device;
  uint64_t nbytes;
};
// Enqueues the copies of a buffer's pieces and of tables that the kernels need beside them. One
// call copies all: a table in a call of its own would queue behind the copies of the other streams,
// and the link would idle while the kernels of all of them wait for their tables.
using CopyWithTables = std::function<void(std::span<const Copy>)>;

// Pieces that continue each other on both sides become one; empty ones go. Order and bytes stay.
// Pure.
std::vector<CopyPiece> merge_adjacent(std::span<const CopyPiece> pieces);

// A stream of our own in the device's primary context. Work on it is ordered by nothing else: it
// never synchronises with the default stream. It has the lowest priority, which is that of every
// stream for which nobody asks for another. Used by one thread at a time. REQUIRES: the device's
// context is current in every call.
class CopyStream {
 public:
  // `batches`: whether the driver takes many copies in one call, as far as is known; shared by the
  // streams of a device. It takes them only from pinned buffers.
  CopyStream(const Driver& driver, std::atomic<bool>& batches);
  ~CopyStream();
  CopyStream(const CopyStream&) = delete;
  CopyStream& operator=(const CopyStream&) = delete;

  // Enqueues the copies of one buffer, and then its event. `around` (if it is set) calls the
  // function that it gets, which enqueues the copies, and enqueues more. Throws Error(device); some
  // of it may be enqueued then.
  void issue(std::byte* buffer, Event event, std::span<const CopyPiece> pieces, Direction direction,
             const std::function<void(Stream, const CopyWithTables&)>& around);

  // Overwrites the ranges with zeros and waits for that. Throws Error(device).
  void zero(std::span<const DeviceRange> ranges);

  // Waits until nothing enqueued so far runs any more; another result than success when the driver
  // cannot tell.
  Result settle() noexcept;

 private:
  void copy_one(const Copy& copy, Direction direction);
  bool copy_batched(std::span<const Copy> copies, Direction direction);
  void copy_many(std::span<const Copy> copies, Direction direction);

  const Driver& driver_;
  Stream stream_ = nullptr;
  std::atomic<bool>& batches_;
};

}  // namespace tensorizer::device::cuda
