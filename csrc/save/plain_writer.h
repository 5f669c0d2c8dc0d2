// Writes payloads at given offsets of a sink, without records around them: the content of a
// .safetensors file behind its header. Confined to one thread; workers are its own.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <stop_token>

#include "io/range_sink.h"

namespace tensorizer::save {

// Bytes in host memory, and where they go.
struct PlainPiece {
  uint64_t offset;  // absolute in the sink
  std::span<const std::byte> bytes;
};

class PlainWriter {
 public:
  // `max_workers` 0: as many as are useful.
  PlainWriter(std::shared_ptr<io::RangeSink> sink, unsigned max_workers);

  // Writes all pieces, cut into units that several workers write at once. Returns when the memory
  // is no longer needed. Small neighbours go out together.
  void write(std::span<const PlainPiece> pieces, const std::stop_token& stop);

  io::RangeSink& sink() noexcept { return *sink_; }
  uint64_t nbytes_done() const noexcept { return nbytes_done_.load(std::memory_order_relaxed); }

 private:
  const std::shared_ptr<io::RangeSink> sink_;
  const unsigned max_workers_;
  std::atomic<uint64_t> nbytes_done_{0};
};

}  // namespace tensorizer::save
