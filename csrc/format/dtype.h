// Stored dtype strings: a numpy dtype, and for types numpy lacks a torch name after a NUL. Pure.
// Source: docs/format.md, "dtypes".
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace tensorizer::format {

struct StoredDtype {
  char byte_order = '|';  // '<', '>', '|' or '='
  char kind = 0;          // numpy kind letter: b i u f c V ...
  uint32_t itemsize = 0;  // bytes per element
  std::string_view
      torch_name;  // "torch.bfloat16"; empty where the numpy part says it all. Borrows the input.

  bool opaque() const noexcept { return kind == 'V'; }
};

// Splits and checks a stored dtype. Throws Error(malformed): empty, no numpy dtype, more than one
// separator, itemsize 0 or above 2^16, an opaque kind without "torch.<identifier>" behind it unless
// `allow_bare_void` (index entries of tensors without data may leave the torch name out,
// format.md 5.5). Whether torch knows the name is not decided here. A numpy type that tensors
// cannot have (text, dates, long double) is malformed too. A torch name behind an ordinary type is
// ignored. Big-endian types parse: the caller decides about them.
StoredDtype parse_dtype(std::string_view stored, bool allow_bare_void = false);

// Whether two parsed dtypes are one type in different spellings: "<u2" and "<V2\0torch.uint16",
// torch.half and torch.float16. Names unknown here are compared as they stand.
bool same_dtype(const StoredDtype& a, const StoredDtype& b) noexcept;

// A dtype of safetensors files and its name in this format (docs/safetensors.md, "dtypes").
struct SafetensorsDtype {
  std::string_view name;    // in a safetensors header
  uint32_t bits;            // per element of the header's shape
  std::string_view stored;  // in a .tensors file; empty: no tensor has this type
  // Header elements per element of the tensor: 2 where torch packs two into a byte.
  uint32_t packed() const noexcept { return bits == 4 ? 2 : 1; }
};

// All of them, in the order in which canonical files hold tensors.
std::span<const SafetensorsDtype> safetensors_dtypes() noexcept;

// nullptr if it has no name there.
const SafetensorsDtype* find_safetensors_dtype(std::string_view name) noexcept;
// By stored dtype text, in any of its spellings. nullptr also for text that is no dtype.
const SafetensorsDtype* safetensors_dtype_of(std::string_view stored) noexcept;

}  // namespace tensorizer::format
