// Making, comparing and showing bytes in tests.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "core/endian.h"
#include "core/error.h"

namespace tensorizer::testing {

using Bytes = std::vector<std::byte>;

inline Bytes random_bytes(size_t nbytes, uint64_t seed = 1) {
  std::mt19937_64 random(seed);
  Bytes bytes(nbytes);
  for (size_t i = 0; i < nbytes; i += 8) {
    const uint64_t word = random();
    std::memcpy(bytes.data() + i, &word, std::min<size_t>(8, nbytes - i));
  }
  return bytes;
}

// EXPECT_EQ of two vectors looks at byte after byte, which takes most of a test's time under TSan.
inline ::testing::AssertionResult same(std::span<const std::byte> found,
                                       std::span<const std::byte> wanted) {
  if (found.size() != wanted.size())
    return ::testing::AssertionFailure() << found.size() << " bytes, not " << wanted.size();
  if (found.empty() || std::memcmp(found.data(), wanted.data(), found.size()) == 0)
    return ::testing::AssertionSuccess();
  const auto at = std::mismatch(found.begin(), found.end(), wanted.begin()).first - found.begin();
  return ::testing::AssertionFailure() << "byte " << at << " of " << found.size() << " differs";
}

// Whether each byte is one of two. TSan would look at byte after byte here too.
__attribute__((no_sanitize("thread"))) inline bool only_holds(std::span<const std::byte> found,
                                                              std::byte one, std::byte other) {
  const std::byte* const end = found.data() + found.size();
  for (const std::byte* at = found.data(); at != end; ++at)
    if (*at != one && *at != other) return false;
  return true;
}

// "01 00 ff" and "0100ff" alike.
inline Bytes from_hex(std::string_view text) {
  Bytes bytes;
  std::string digits;
  for (const char c : text) {
    if (c == ' ' || c == '\n') continue;
    digits.push_back(c);
    if (digits.size() < 2) continue;
    bytes.push_back(static_cast<std::byte>(std::stoul(digits, nullptr, 16)));
    digits.clear();
  }
  if (!digits.empty()) throw std::invalid_argument("half a byte in hex");
  return bytes;
}

inline std::string to_hex(std::span<const std::byte> bytes) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (const std::byte byte : bytes) {
    text.push_back(kDigits[std::to_integer<unsigned>(byte) >> 4]);
    text.push_back(kDigits[std::to_integer<unsigned>(byte) & 0xF]);
  }
  return text;
}

inline Bytes from_text(std::string_view text) {
  const auto bytes = std::as_bytes(std::span(text));
  return {bytes.begin(), bytes.end()};
}

// Builds a structure field by field.
class Build {
 public:
  template <class T>
  Build& le(T value) {
    const size_t at = bytes_.size();
    bytes_.resize(at + sizeof value);
    store_le(&bytes_[at], value);
    return *this;
  }
  Build& text(std::string_view text) { return raw(std::as_bytes(std::span(text))); }
  Build& raw(std::span<const std::byte> bytes) {
    bytes_.insert(bytes_.end(), bytes.begin(), bytes.end());
    return *this;
  }
  Build& zeros(size_t count) {
    bytes_.resize(bytes_.size() + count);
    return *this;
  }
  const Bytes& bytes() const { return bytes_; }
  operator const Bytes&() const { return bytes_; }

 private:
  Bytes bytes_;
};

// Runs `action`; expects Error(code) and returns its text.
template <class Action>
std::string expect_error(Errc code, Action&& action) {
  try {
    action();
  } catch (const Error& error) {
    EXPECT_EQ(static_cast<int>(error.code()), static_cast<int>(code)) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "no error";
  return {};
}

}  // namespace tensorizer::testing
