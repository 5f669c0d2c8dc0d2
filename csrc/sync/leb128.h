// Unsigned LEB128 in its shortest form: seven bits a byte, the lowest first, the top bit set where
// another byte follows. Pure.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace tensorizer::sync {

inline constexpr size_t kMaxLeb128 = 10;  // bytes of a 64-bit number

inline size_t leb128_nbytes(uint64_t value) noexcept {
  size_t n = 1;
  while (value >>= 7) ++n;
  return n;
}

inline std::byte* put_leb128(std::byte* to, uint64_t value) noexcept {
  for (; value >= 0x80; value >>= 7) *to++ = static_cast<std::byte>(value | 0x80);
  *to++ = static_cast<std::byte>(value);
  return to;
}

// Of bytes that were checked.
inline const std::byte* take_leb128(const std::byte* from, uint64_t& value) noexcept {
  uint64_t taken = static_cast<uint64_t>(*from) & 0x7F;
  for (unsigned shift = 7; (*from++ & std::byte{0x80}) != std::byte{0}; shift += 7)
    taken |= (static_cast<uint64_t>(*from) & 0x7F) << shift;
  value = taken;
  return from;
}

// Of bytes that come from outside: null where they end too early, take more than ten bytes, more
// than 64 bits, or more bytes than the number needs.
inline const std::byte* check_leb128(const std::byte* from, const std::byte* end,
                                     uint64_t& value) noexcept {
  uint64_t taken = 0;
  for (unsigned shift = 0; from != end && shift < 7 * kMaxLeb128; shift += 7) {
    const auto byte = static_cast<uint64_t>(*from++);
    if (shift == 63 && byte > 1) return nullptr;
    taken |= (byte & 0x7F) << shift;
    if (byte & 0x80) continue;
    if (byte == 0 && shift != 0) return nullptr;
    value = taken;
    return from;
  }
  return nullptr;
}

}  // namespace tensorizer::sync
