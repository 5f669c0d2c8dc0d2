// UTF-8 as stored names and dtypes use it. Pure.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace tensorizer::format {

// One decoded sequence: its code point, and how many bytes it took; nbytes 0 where the bytes are
// not UTF-8.
struct Utf8Char {
  uint32_t code_point = 0;
  size_t nbytes = 0;
};

// Decodes the first sequence of `text`. Overlong forms and values beyond U+10FFFF are refused;
// surrogates (U+D800..U+DFFF, three bytes: "WTF-8") only with `allow_surrogates`. REQUIRES: text is
// not empty.
Utf8Char decode_utf8(std::string_view text, bool allow_surrogates = false) noexcept;

// Strict UTF-8 from the first byte to the last.
bool is_utf8(std::string_view text) noexcept;

// Appends one code point, surrogates included. REQUIRES: code_point <= 0x10FFFF.
void append_utf8(std::string& out, uint32_t code_point);

inline constexpr bool is_digit(char c) noexcept { return c >= '0' && c <= '9'; }

inline constexpr bool is_high_surrogate(uint32_t c) noexcept { return c >= 0xD800 && c <= 0xDBFF; }
inline constexpr bool is_low_surrogate(uint32_t c) noexcept { return c >= 0xDC00 && c <= 0xDFFF; }
inline constexpr bool is_surrogate(uint32_t c) noexcept { return c >= 0xD800 && c <= 0xDFFF; }

}  // namespace tensorizer::format
