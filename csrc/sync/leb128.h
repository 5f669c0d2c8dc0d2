// Unsigned LEB128 in its shortest form: seven bits a byte, the lowest first, the top bit set where
// another byte follows. Pure.
#pragma once

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

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

// Reads as many gaps as there is room for, as numbers: each gap leads from `next` to a number, and
// `next` becomes the one behind it. Of bytes that were checked, and that go on to `end`. Returns
// where the gap that follows begins.
inline const std::byte* take_numbers(const std::byte* from, [[maybe_unused]] const std::byte* end,
                                     uint64_t& next, std::span<uint64_t> numbers) noexcept {
  uint64_t number = next;
  size_t i = 0;
#if defined(__x86_64__)
  // 64 bytes at a time. Bit b of `ends` is set where byte b is the last one of a gap: no branch
  // depends on whether a gap has one byte or two.
  constexpr ptrdiff_t kAtOnce = 64;
  while (i < numbers.size() && end - from >= kAtOnce + 8) {
    uint64_t goes_on = 0;
    for (int part = 0; part < 4; ++part) {
      const __m128i bytes =
          _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + ptrdiff_t{part} * 16));
      goes_on |= static_cast<uint64_t>(static_cast<unsigned>(_mm_movemask_epi8(bytes)))
                 << (16 * part);
    }
    if (goes_on == 0 && numbers.size() - i >= kAtOnce) {
      for (ptrdiff_t k = 0; k < kAtOnce; ++k) {
        number += static_cast<uint64_t>(from[k]);
        numbers[i + static_cast<size_t>(k)] = number++;
      }
      from += kAtOnce;
      i += kAtOnce;
      continue;
    }
    uint64_t ends = ~goes_on;
    const size_t n = std::min(static_cast<size_t>(std::popcount(ends)), numbers.size() - i);
    if (n == 0) break;
    ptrdiff_t begin = 0;
    for (size_t k = 0; k < n; ++k, ends &= ends - 1) {
      const ptrdiff_t last = std::countr_zero(ends);
      uint64_t bytes = 0;
      std::memcpy(&bytes, from + begin, sizeof bytes);
      uint64_t gap = (bytes & 0x7F) | (bytes >> 1 & 0x3F80 & (uint64_t{0} - (last != begin)));
      if (last - begin > 1) take_leb128(from + begin, gap);
      begin = last + 1;
      number += gap;
      numbers[i++] = number++;
    }
    from += begin;
  }
#endif
  for (; i < numbers.size(); ++i) {
    uint64_t gap = 0;
    from = take_leb128(from, gap);
    number += gap;
    numbers[i] = number++;
  }
  next = number;
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

struct ShortGaps {
  size_t nbytes = 0;
  size_t count = 0;
  uint64_t sum = 0;  // of the gaps
};

// Looks at the gaps behind `from`, in front of which another gap lies. Bytes that come from
// outside: the result is empty if some of the next 64 bytes are missing or belong to a gap that is
// not in its shortest form or takes more than two bytes, as check_leb128() finds out.
inline ShortGaps check_short_gaps([[maybe_unused]] const std::byte* from,
                                  [[maybe_unused]] const std::byte* end) noexcept {
#if defined(__x86_64__)
  constexpr size_t kAtOnce = 64;
  if (end - from < static_cast<ptrdiff_t>(kAtOnce)) return {};
  const __m128i zero = _mm_setzero_si128();
  __m128i firsts = zero, seconds = zero;  // sums of bytes
  uint64_t goes_on = 0, zeros = 0;
  for (unsigned part = 0; part < 4; ++part) {
    const auto load = [&](const std::byte* at) {
      return _mm_loadu_si128(reinterpret_cast<const __m128i*>(at + size_t{part} * 16));
    };
    const auto bits = [&](__m128i bytes) {
      return static_cast<uint64_t>(static_cast<unsigned>(_mm_movemask_epi8(bytes))) << (16 * part);
    };
    const __m128i bytes = load(from);
    const __m128i second = _mm_cmplt_epi8(load(from - 1), zero);
    const __m128i low = _mm_and_si128(bytes, _mm_set1_epi8(0x7F));
    goes_on |= bits(bytes);
    zeros |= bits(_mm_cmpeq_epi8(bytes, zero));
    firsts = _mm_add_epi64(firsts, _mm_sad_epu8(_mm_andnot_si128(second, low), zero));
    seconds = _mm_add_epi64(seconds, _mm_sad_epu8(_mm_and_si128(second, low), zero));
  }
  if ((goes_on << 1 & (goes_on | zeros)) != 0) return {};
  const auto total = [](__m128i sums) {
    return static_cast<uint64_t>(_mm_cvtsi128_si64(sums)) +
           static_cast<uint64_t>(_mm_cvtsi128_si64(_mm_unpackhi_epi64(sums, sums)));
  };
  ShortGaps gaps{kAtOnce, static_cast<size_t>(std::popcount(~goes_on)),
                 total(firsts) + 128 * total(seconds)};
  if (goes_on >> (kAtOnce - 1) != 0) {  // the last byte begins a gap that goes on behind them
    gaps.nbytes -= 1;
    gaps.sum -= static_cast<uint64_t>(from[kAtOnce - 1]) & 0x7F;
  }
  return gaps;
#else
  return {};
#endif
}

}  // namespace tensorizer::sync
