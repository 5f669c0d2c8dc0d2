// What the kernels are written in: one source for the device and for the host, where tests compare
// it with libsodium.
//
// A kernel is a template over a Block. `block.each(f)` calls f(t) for each of the 256 threads, and
// `block.sync()` must lie between two of them. A variable that lives across a sync is in shared
// memory. On the device `each` is one call; tests/native/host_kernels.cpp has
// the host's Block, a loop. Integer arithmetic only, so that both give the same bits.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define TENSORIZER_KERNEL __device__ __forceinline__
#else
#define TENSORIZER_KERNEL static inline  // tests compile their own, with assertions
#endif
#if !defined(TENSORIZER_KERNEL_ASSERT)
#define TENSORIZER_KERNEL_ASSERT(condition) static_cast<void>(false && (condition))  // tests do
#endif

namespace tensorizer::device::cuda {

inline constexpr uint32_t kThreads = 256;

struct Words {
  uint32_t word[4];
};

TENSORIZER_KERNEL unsigned char* pointer_to(uint64_t address) {
  return reinterpret_cast<unsigned char*>(static_cast<uintptr_t>(address));
}

// REQUIRES: a multiple of 16.
TENSORIZER_KERNEL Words load_words(const unsigned char* from) {
#if defined(__CUDACC__)
  const uint4 found = *reinterpret_cast<const uint4*>(from);
  return {{found.x, found.y, found.z, found.w}};
#else
  TENSORIZER_KERNEL_ASSERT(reinterpret_cast<uintptr_t>(from) % 16 == 0);
  Words found;
  std::memcpy(&found, from, sizeof found);
  return found;
#endif
}

TENSORIZER_KERNEL void store_words(unsigned char* to, const Words& words) {
#if defined(__CUDACC__)
  *reinterpret_cast<uint4*>(to) =
      make_uint4(words.word[0], words.word[1], words.word[2], words.word[3]);
#else
  TENSORIZER_KERNEL_ASSERT(reinterpret_cast<uintptr_t>(to) % 16 == 0);
  std::memcpy(to, &words, sizeof words);
#endif
}

#if defined(__CUDACC__)
class DeviceBlock {
 public:
  template <class F>
  __device__ __forceinline__ void each(F f) const {
    f(static_cast<uint32_t>(threadIdx.x));
  }
  __device__ __forceinline__ void sync() const { __syncthreads(); }
  __device__ __forceinline__ uint32_t index() const { return blockIdx.x; }
};
#endif

}  // namespace tensorizer::device::cuda
