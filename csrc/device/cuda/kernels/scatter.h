// Copies many small pieces of one staging slot to their device addresses in one launch. Shared by
// the kernel, the host that launches it and the tests; scatter_on_host defines the result that the
// kernel must give.
#pragma once

#include <cstdint>
#include <cstring>

namespace tensorizer::device::cuda {

// One piece, as the kernel reads it from the slot's table.
struct ScatterPiece {
  uint64_t source_offset;  // in the slot
  uint64_t destination;    // device address
  uint64_t nbytes;
};
static_assert(sizeof(ScatterPiece) == 24);

inline constexpr char kScatterKernelName[] = "tensorizer_scatter";
inline constexpr unsigned kScatterThreads = 256;  // of one block
inline constexpr unsigned kScatterMaxBlocks =
    1024;  // a block takes every kScatterMaxBlocks-th piece

// Pieces above this go faster through the copy engine.
inline constexpr uint64_t kScatterMaxPieceNbytes = 64 << 10;

// The twin on the host: piece after piece, byte for byte. Pieces must not overlap each other.
inline void scatter_on_host(const ScatterPiece* pieces, uint32_t count, const void* slot) {
  const auto* source = static_cast<const unsigned char*>(slot);
  for (uint32_t i = 0; i < count; ++i)
    std::memcpy(reinterpret_cast<void*>(pieces[i].destination), source + pieces[i].source_offset,
                pieces[i].nbytes);
}

}  // namespace tensorizer::device::cuda
