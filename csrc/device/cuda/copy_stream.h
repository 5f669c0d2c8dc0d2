// How copies get onto a CUDA stream: adjacent pieces as one, many small ones in one call.
#pragma once

#include <cstdint>
#include <memory>
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
// never synchronises with the default stream. Confined to one thread at a time. REQUIRES: the
// device's context is current in every call.
class CopyStream {
 public:
  // `pinned`: whether the buffers are; the driver takes many copies in one call only from such.
  CopyStream(const Driver& driver, bool pinned);
  ~CopyStream();
  CopyStream(const CopyStream&) = delete;
  CopyStream& operator=(const CopyStream&) = delete;

  // Enqueues the copies of one buffer and then its event. Throws Error(device); some copies may be
  // enqueued then.
  void issue(std::byte* buffer, Event event, std::span<const CopyPiece> pieces,
             Direction direction);

  // The same, between them what `more` enqueues on the stream that it is given.
  template <class More>
  void issue(std::byte* buffer, Event event, std::span<const CopyPiece> pieces, More&& more) {
    copy_many(buffer, merge_adjacent(pieces), Direction::to_device);
    more(stream_);
    record(event);
  }

  // Overwrites the ranges with zeros and waits for that. Throws Error(device).
  void zero(std::span<const DeviceRange> ranges);

  // Waits until nothing enqueued runs any more; another result than success when the driver cannot
  // tell.
  Result settle() noexcept;

 private:
  void record(Event event);
  void copy_one(std::byte* buffer, const CopyPiece& piece, Direction direction);
  bool copy_batched(std::byte* buffer, std::span<const CopyPiece> pieces, Direction direction);
  void copy_many(std::byte* buffer, std::span<const CopyPiece> pieces, Direction direction);

  friend void keep_for_good(std::unique_ptr<CopyStream> stream) noexcept;

  const Driver& driver_;
  Stream stream_ = nullptr;
  bool batches_;
  CopyStream* kept_before_ = nullptr;  // see keep_for_good()
};

// A stream whose copies may still run is never destroyed; it stays reachable to the end.
void keep_for_good(std::unique_ptr<CopyStream> stream) noexcept;

}  // namespace tensorizer::device::cuda
