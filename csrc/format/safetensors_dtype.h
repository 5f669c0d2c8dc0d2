// The dtypes of safetensors files and what this format calls them: the one table of both.
// Source: docs/safetensors.md, "dtypes".
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

namespace tensorizer::format {

struct SafetensorsDtype {
  std::string_view name;    // in a safetensors header
  uint32_t bits;            // per element of the header's shape
  std::string_view stored;  // in a .tensors file; empty: no tensor has this type
  // Header elements per element of the tensor: 2 where torch packs two into a byte.
  uint32_t packed() const noexcept { return bits == 4 ? 2 : 1; }
};

// All of them, in the order in which canonical files hold tensors.
std::span<const SafetensorsDtype> safetensors_dtypes() noexcept;

// nullptr where there is none.
const SafetensorsDtype* find_safetensors_dtype(std::string_view name) noexcept;
// By stored dtype text, in any of its spellings. nullptr also for text that is no dtype.
const SafetensorsDtype* safetensors_dtype_of(std::string_view stored) noexcept;

}  // namespace tensorizer::format
