// The inner loops over elements, in the widest instructions that this processor has. Pure.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace tensorizer::sync {

// Elements whose numbers and words are worked on together: they stay in the first cache.
inline constexpr size_t kBlock = 128;

// Bytes of each copy that differing() compares at most.
inline constexpr size_t kComparedByKernel = size_t{16} << 10;
// It writes so many places more than it found, to no purpose.
inline constexpr size_t kSparePlaces = 32;

struct ElementKernel {
  const char* name;
  bool (*usable)() noexcept;  // on this processor, under this operating system
  // What `n` elements with these numbers add to element_sum(). Word w of the i-th is
  // words[w * kBlock + i]; there are one or two words.
  uint64_t (*sum)(const uint64_t* numbers, const uint64_t* words, size_t nwords, size_t n) noexcept;
  // Writes the numbers of the elements that differ, counted from the first of `n`, in ascending
  // order. Returns how many they are.
  size_t (*differing)(const std::byte* before, const std::byte* after, size_t n, size_t itemsize,
                      uint16_t* places) noexcept;
};

// All that this build has, the preferred first; the last is usable everywhere.
std::span<const ElementKernel> compiled_element_kernels() noexcept;
// The first that is usable here.
const ElementKernel& element_kernel_here() noexcept;

}  // namespace tensorizer::sync
