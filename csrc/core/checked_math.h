// Sums and products of untrusted 64-bit numbers. Pure: nullopt where the exact result does not fit.
#pragma once

#include <cstdint>
#include <optional>

namespace tensorizer {

inline std::optional<uint64_t> checked_add(uint64_t a, uint64_t b) noexcept {
  uint64_t sum = 0;
  if (__builtin_add_overflow(a, b, &sum)) return std::nullopt;
  return sum;
}

inline std::optional<uint64_t> checked_mul(uint64_t a, uint64_t b) noexcept {
  uint64_t product = 0;
  if (__builtin_mul_overflow(a, b, &product)) return std::nullopt;
  return product;
}

inline constexpr uint64_t align_up(uint64_t value, uint64_t alignment) noexcept {
  return (value + alignment - 1) / alignment * alignment;
}

inline constexpr uint64_t align_down(uint64_t value, uint64_t alignment) noexcept {
  return value / alignment * alignment;
}

inline constexpr uint64_t ceil_div(uint64_t a, uint64_t b) noexcept { return a / b + (a % b != 0); }

}  // namespace tensorizer
