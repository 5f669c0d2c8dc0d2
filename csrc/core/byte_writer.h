// Appends little-endian integers and bytes to a buffer: the writing side of byte_cursor.h. Borrows
// the buffer.
#pragma once

#include <cstddef>
#include <cstring>
#include <span>
#include <string_view>
#include <vector>

#include "core/endian.h"

namespace tensorizer {

class ByteWriter {
 public:
  explicit ByteWriter(std::vector<std::byte>& out) noexcept : out_(out) {}

  template <class T>
    requires std::is_integral_v<T>
  void put(T value) {
    store_le(grow(sizeof value), value);
  }
  void put_bytes(std::span<const std::byte> bytes) {
    if (!bytes.empty()) std::memcpy(grow(bytes.size()), bytes.data(), bytes.size());
  }
  void put_text(std::string_view text) { put_bytes(std::as_bytes(std::span(text))); }
  void put_zeros(size_t nbytes) { grow(nbytes); }

 private:
  // The first of `nbytes` more bytes, which are zero.
  std::byte* grow(size_t nbytes) {
    const size_t at = out_.size();
    out_.resize(at + nbytes);
    return out_.data() + at;
  }

  std::vector<std::byte>& out_;
};

}  // namespace tensorizer
