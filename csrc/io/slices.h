// Scatter lists: consecutive bytes of a source that land in (or come from) several places of
// memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace tensorizer::io {

using Slice = std::span<std::byte>;
using ConstSlice = std::span<const std::byte>;

inline uint64_t total_nbytes(std::span<const Slice> slices) noexcept {
  uint64_t total = 0;
  for (const Slice& slice : slices) total += slice.size();
  return total;
}

inline uint64_t total_nbytes(std::span<const ConstSlice> slices) noexcept {
  uint64_t total = 0;
  for (const ConstSlice& slice : slices) total += slice.size();
  return total;
}

}  // namespace tensorizer::io
