// Stored dtype strings: a numpy dtype, and for types numpy lacks a torch name after a NUL. Pure.
// Source: docs/format.md, "dtypes".
#pragma once

#include <cstdint>
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

}  // namespace tensorizer::format
