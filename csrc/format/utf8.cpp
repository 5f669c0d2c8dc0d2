#include "format/utf8.h"

#include <cstring>

namespace tensorizer::format {

Utf8Char decode_utf8(std::string_view text, bool allow_surrogates) noexcept {
  const auto first = static_cast<uint8_t>(text[0]);
  if (first < 0x80) return {first, 1};
  size_t nbytes = 0;
  uint32_t code_point = 0;
  uint32_t smallest = 0;  // anything below would be an overlong form
  if (first >= 0xC2 && first <= 0xDF) {
    nbytes = 2, code_point = first & 0x1Fu, smallest = 0x80;
  } else if (first >= 0xE0 && first <= 0xEF) {
    nbytes = 3, code_point = first & 0x0Fu, smallest = 0x800;
  } else if (first >= 0xF0 && first <= 0xF4) {
    nbytes = 4, code_point = first & 0x07u, smallest = 0x10000;
  } else {
    return {};
  }
  if (text.size() < nbytes) return {};
  for (size_t i = 1; i < nbytes; ++i) {
    const auto next = static_cast<uint8_t>(text[i]);
    if ((next & 0xC0) != 0x80) return {};
    code_point = code_point << 6 | (next & 0x3Fu);
  }
  if (code_point < smallest || code_point > 0x10FFFF) return {};
  if (is_surrogate(code_point) && !allow_surrogates) return {};
  return {code_point, nbytes};
}

bool is_utf8(std::string_view text) noexcept {
  while (!text.empty()) {
    // Names are ASCII as a rule: eight bytes at a time.
    while (text.size() >= 8) {
      uint64_t word;
      std::memcpy(&word, text.data(), sizeof word);
      if ((word & 0x8080808080808080u) != 0) break;
      text.remove_prefix(8);
    }
    if (text.empty()) break;
    const Utf8Char next = decode_utf8(text);
    if (next.nbytes == 0) return false;
    text.remove_prefix(next.nbytes);
  }
  return true;
}

void append_utf8(std::string& out, uint32_t c) {
  const auto put = [&out](uint32_t byte) { out.push_back(static_cast<char>(byte)); };
  if (c < 0x80) {
    put(c);
  } else if (c < 0x800) {
    put(0xC0 | c >> 6), put(0x80 | (c & 0x3F));
  } else if (c < 0x10000) {
    put(0xE0 | c >> 12), put(0x80 | (c >> 6 & 0x3F)), put(0x80 | (c & 0x3F));
  } else {
    put(0xF0 | c >> 18), put(0x80 | (c >> 12 & 0x3F)), put(0x80 | (c >> 6 & 0x3F)),
        put(0x80 | (c & 0x3F));
  }
}

}  // namespace tensorizer::format
