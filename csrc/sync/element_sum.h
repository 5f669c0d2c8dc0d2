// The sum that stands for the content of a tensor, docs/format.md: modulo 2^64 over its elements,
// each mixed with its number. A change of some elements changes the sum by what those elements
// contribute. It finds accidents; an attacker can forge it. Pure.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <stop_token>
#include <string>
#include <vector>

#include "core/error.h"

namespace tensorizer::sync {

inline constexpr uint64_t finalize(uint64_t x) noexcept {
  x ^= x >> 33;
  x *= 0xFF51AFD7ED558CCDu;
  x ^= x >> 33;
  x *= 0xC4CEB9FE1A85EC53u;
  return x ^ (x >> 33);
}

// An element of kItemsize bytes as little-endian words, the last one filled with zeros.
template <size_t kItemsize>
struct Element {
  static constexpr size_t kWords = (kItemsize + 7) / 8;

  explicit Element(const std::byte* from) noexcept { std::memcpy(words.data(), from, kItemsize); }
  friend bool operator==(const Element&, const Element&) = default;

  std::array<uint64_t, kWords> words{};
};

// What the number of an element adds before its bytes do.
inline constexpr uint64_t mixed_number(uint64_t number) noexcept {
  return finalize(number + 0x9E3779B97F4A7C15u);
}

template <size_t kItemsize>
uint64_t mixed(uint64_t number_mixed, const Element<kItemsize>& element) noexcept {
  for (const uint64_t word : element.words) number_mixed = finalize(number_mixed ^ word);
  return number_mixed;
}

// Calls work.template operator()<kItemsize>() for the size of an element; every dtype has one of
// these. Error(invalid_argument) for another size.
template <class Work>
auto with_itemsize(size_t itemsize, const Work& work) {
  switch (itemsize) {
    case 1:
      return work.template operator()<1>();
    case 2:
      return work.template operator()<2>();
    case 4:
      return work.template operator()<4>();
    case 8:
      return work.template operator()<8>();
    case 16:
      return work.template operator()<16>();
    default:
      throw Error(Errc::invalid_argument,
                  "itemsize: expected 1, 2, 4, 8 or 16 bytes, got " + std::to_string(itemsize));
  }
}

// A tensor, or a part of one that begins with the element `first`.
struct Elements {
  std::span<const std::byte> bytes;
  size_t itemsize = 1;
  uint64_t first = 0;
};

// The sum of each, on at most `workers` threads.
std::vector<uint64_t> element_sums(std::span<const Elements> tensors, unsigned workers,
                                   const std::stop_token& stop);

}  // namespace tensorizer::sync
