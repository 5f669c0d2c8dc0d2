#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "sync/element_kernels.h"

#include <bit>
#include <cstring>

#include "core/cpu_features.h"
#include "sync/element_sum.h"

#define INLINE __attribute__((always_inline)) inline

namespace tensorizer::sync {
namespace {

// Compiled for several instruction sets, as vectors of whatever width these have.
INLINE uint64_t sum_of_blocks(const uint64_t* numbers, const uint64_t* words, size_t nwords,
                              size_t n) noexcept {
  uint64_t sum = 0;
  if (nwords == 1) {
    for (size_t i = 0; i < n; ++i) sum += finalize(mixed_number(numbers[i]) ^ words[i]);
  } else {
    for (size_t i = 0; i < n; ++i)
      sum += finalize(finalize(mixed_number(numbers[i]) ^ words[i]) ^ words[kBlock + i]);
  }
  return sum;
}

uint64_t plain_sum_of(const uint64_t* numbers, const uint64_t* words, size_t nwords,
                      size_t n) noexcept {
  return sum_of_blocks(numbers, words, nwords, n);
}

template <size_t kItemsize>
size_t plain_differing_of(const std::byte* before, const std::byte* after, size_t n,
                          uint16_t* places) noexcept {
  size_t found = 0;
  const auto compare_elements = [&](size_t from, size_t to) {
    for (size_t i = from; i < to; ++i) {
      places[found] = static_cast<uint16_t>(i);
      found += std::memcmp(before + i * kItemsize, after + i * kItemsize, kItemsize) != 0;
    }
  };
  // Most elements are as they were: blocks that did not change are passed over as words.
  constexpr size_t kWords = 8;
  constexpr size_t kElements = kWords * 8 / kItemsize;
  size_t i = 0;
  for (; i + kElements <= n; i += kElements) {
    const Element<kWords * 8> was(before + i * kItemsize), is(after + i * kItemsize);
    uint64_t differing = 0;
    for (size_t word = 0; word < kWords; ++word) differing |= was.words[word] ^ is.words[word];
    if (differing != 0) compare_elements(i, i + kElements);
  }
  compare_elements(i, n);
  return found;
}

size_t plain_differing(const std::byte* before, const std::byte* after, size_t n, size_t itemsize,
                       uint16_t* places) noexcept {
  return with_itemsize(itemsize, [&]<size_t kItemsize>() {
    return plain_differing_of<kItemsize>(before, after, n, places);
  });
}

#if defined(__x86_64__)

#define AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi2")))

__attribute__((target("avx2"))) uint64_t sum_avx2(const uint64_t* numbers, const uint64_t* words,
                                                  size_t nwords, size_t n) noexcept {
  return sum_of_blocks(numbers, words, nwords, n);
}

AVX512 uint64_t sum_avx512(const uint64_t* numbers, const uint64_t* words, size_t nwords,
                           size_t n) noexcept {
  return sum_of_blocks(numbers, words, nwords, n);
}

// Bit i is set where the i-th element of 64 bytes differs.
template <size_t kItemsize>
AVX512 INLINE uint64_t differing_in(__m512i was, __m512i is) noexcept {
  if constexpr (kItemsize == 1) return _mm512_cmpneq_epi8_mask(was, is);
  if constexpr (kItemsize == 2) return _mm512_cmpneq_epi16_mask(was, is);
  if constexpr (kItemsize == 4) return _mm512_cmpneq_epi32_mask(was, is);
  const unsigned words = _mm512_cmpneq_epi64_mask(was, is);
  if constexpr (kItemsize == 8) return words;
  const unsigned either = words | words >> 1;  // of elements of two words, at every second bit
  return (either & 1) | (either >> 1 & 2) | (either >> 2 & 4) | (either >> 3 & 8);
}

// No branch depends on what differs: the places of all that do are pushed together and stored.
template <size_t kItemsize>
AVX512 size_t differing_avx512_of(const std::byte* before, const std::byte* after, size_t n,
                                  uint16_t* places) noexcept {
  constexpr size_t kElements = 64 / kItemsize;
  alignas(64) static constexpr uint16_t kFirst[32] = {0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10,
                                                      11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21,
                                                      22, 23, 24, 25, 26, 27, 28, 29, 30, 31};
  uint16_t* to = places;
  __m512i numbers = _mm512_load_si512(kFirst);
  size_t i = 0;
  for (; i + kElements <= n; i += kElements) {
    const std::byte* const at = before + i * kItemsize;
    const uint64_t found =
        differing_in<kItemsize>(_mm512_loadu_si512(at), _mm512_loadu_si512(after + i * kItemsize));
    for (size_t half = 0; half < kElements; half += 32) {
      const auto mask = static_cast<uint32_t>(found >> half);
      _mm512_storeu_si512(to, _mm512_maskz_compress_epi16(mask, numbers));
      to += std::popcount(mask);
      numbers = _mm512_add_epi16(numbers, _mm512_set1_epi16(kElements < 32 ? kElements : 32));
    }
  }
  for (; i < n; ++i) {
    *to = static_cast<uint16_t>(i);
    to += std::memcmp(before + i * kItemsize, after + i * kItemsize, kItemsize) != 0;
  }
  return static_cast<size_t>(to - places);
}

size_t differing_avx512(const std::byte* before, const std::byte* after, size_t n, size_t itemsize,
                        uint16_t* places) noexcept {
  return with_itemsize(itemsize, [&]<size_t kItemsize>() {
    return differing_avx512_of<kItemsize>(before, after, n, places);
  });
}

bool has_avx2() noexcept { return cpu_features().avx2; }
bool has_avx512() noexcept {
  const CpuFeatures& cpu = cpu_features();
  return cpu.avx512f && cpu.avx512bw && cpu.avx512dq && cpu.avx512vl && cpu.avx512vbmi2;
}

#endif

constexpr ElementKernel kElementKernels[] = {
#if defined(__x86_64__)
    {"avx512", &has_avx512, &sum_avx512, &differing_avx512},
    {"avx2", &has_avx2, &sum_avx2, &plain_differing},
#endif
    {"plain", []() noexcept { return true; }, &plain_sum_of, &plain_differing}};

}  // namespace

std::span<const ElementKernel> compiled_element_kernels() noexcept { return kElementKernels; }

const ElementKernel& element_kernel_here() noexcept {
  static const ElementKernel& chosen = []() -> const ElementKernel& {
    const ElementKernel* kernel = kElementKernels;
    while (!kernel->usable()) ++kernel;
    return *kernel;
  }();
  return chosen;
}

}  // namespace tensorizer::sync
