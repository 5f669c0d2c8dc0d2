// How copies get onto a CUDA stream: adjacent pieces as one, many small ones in one call, or in one
// kernel.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "device/copy_engine.h"
#include "device/cuda/cuda_device.h"

namespace tensorizer::device::cuda {

enum class Direction : uint8_t { to_device, to_host };

// Pieces that continue each other on both sides become one; empty ones go. Order and bytes stay.
// Pure.
std::vector<CopyPiece> merge_adjacent(std::span<const CopyPiece> pieces);

// A stream of our own in the device's primary context. Work on it is ordered only by the events it
// is told to wait for: it never synchronises with the default stream. Confined to one thread at a
// time, except settle(). REQUIRES: the device's context is current in every call; `device` has its
// ring in use.
class CopyStream {
 public:
  CopyStream(Device& device, bool use_scatter_kernel);
  ~CopyStream();
  CopyStream(const CopyStream&) = delete;
  CopyStream& operator=(const CopyStream&) = delete;

  // Enqueues the copies of one slot and then its event. Throws Error(device); some copies may be
  // enqueued then.
  void issue(PinnedRing& ring, unsigned slot, std::span<const CopyPiece> pieces,
             Direction direction);

  // Overwrites the ranges with zeros, after all copies enqueued before, and waits for that.
  // Throws Error(device).
  void zero(std::span<const DeviceRange> ranges);

  // What is enqueued next runs after `event`.
  void wait_for(Event event);

  // `event` happens when all that is enqueued has run.
  void record(Event event);

  // Waits until nothing enqueued runs any more; false when the driver cannot tell. Safe from any
  // thread.
  bool settle() noexcept;

 private:
  void copy_one(std::byte* slot, const CopyPiece& piece, Direction direction);
  void copy_each(std::byte* slot, std::span<const CopyPiece> pieces, Direction direction);
  bool copy_batched(std::byte* slot, std::span<const CopyPiece> pieces, Direction direction);
  void copy_many(std::byte* slot, std::span<const CopyPiece> pieces, Direction direction);
  std::vector<CopyPiece> scatter_small(PinnedRing& ring, unsigned slot,
                                       std::vector<CopyPiece> pieces);
  DevicePointer mapped(std::byte* host);

  const Driver& driver_;
  Stream stream_ = nullptr;
  Function scatter_ = nullptr;
  bool batches_;
};

}  // namespace tensorizer::device::cuda
