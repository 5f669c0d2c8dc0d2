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

  // Enqueues the copies of one buffer, what `more` enqueues (if it is set), and then the buffer's
  // event. Throws Error(device); some of it may be enqueued then.
  void issue(std::byte* buffer, Event event, std::span<const CopyPiece> pieces, Direction direction,
             const std::function<void(Stream)>& more);

  // Overwrites the ranges with zeros and waits for that. Throws Error(device).
  void zero(std::span<const DeviceRange> ranges);

  // Waits until nothing enqueued so far runs any more; another result than success when the driver
  // cannot tell.
  Result settle() noexcept;

 private:
  void copy_one(std::byte* buffer, const CopyPiece& piece, Direction direction);
  bool copy_batched(std::byte* buffer, std::span<const CopyPiece> pieces, Direction direction);
  void copy_many(std::byte* buffer, std::span<const CopyPiece> pieces, Direction direction);

  const Driver& driver_;
  Stream stream_ = nullptr;
  std::atomic<bool>& batches_;
};

}  // namespace tensorizer::device::cuda
