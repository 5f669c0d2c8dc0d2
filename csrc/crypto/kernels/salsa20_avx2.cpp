// Eight Salsa20 blocks at a time: register i holds word i of all eight. Sixteen words fill all
// sixteen registers, so the compiler spills a few; that costs less than shuffling words of fewer
// blocks would.
#if defined(__x86_64__)
#include <immintrin.h>

#include "crypto/kernels/salsa20.h"

#define TARGET __attribute__((target("avx2")))
#define INLINE __attribute__((target("avx2"), always_inline)) inline

#include "crypto/kernels/salsa20_rounds.h"

namespace tensorizer::crypto {
namespace {

constexpr size_t kBlocks = 8;

struct Eight {
  using Word = __m256i;
  static INLINE Word plus(Word a, Word b) { return _mm256_add_epi32(a, b); }
  template <int kBits>
  static INLINE Word xor_rotated(Word word, Word sum) {
    word = _mm256_xor_si256(word, _mm256_slli_epi32(sum, kBits));
    return _mm256_xor_si256(word, _mm256_srli_epi32(sum, 32 - kBits));
  }
};

// The words of the state in eight lanes, with the counters `counter` to `counter` + 7.
INLINE void spread(__m256i x[16], const SalsaState& state, uint64_t counter) {
  for (int i = 0; i < 16; ++i) x[i] = _mm256_set1_epi32(static_cast<int>(state[i]));
  alignas(32) uint32_t low[kBlocks], high[kBlocks];
  for (uint32_t lane = 0; lane < kBlocks; ++lane) {
    low[lane] = static_cast<uint32_t>(counter + lane);
    high[lane] = static_cast<uint32_t>((counter + lane) >> 32);
  }
  x[8] = _mm256_load_si256(reinterpret_cast<const __m256i*>(low));
  x[9] = _mm256_load_si256(reinterpret_cast<const __m256i*>(high));
}

// Four words of all blocks to the same four words of two blocks each: half h of row b is block 4 *
// h + b.
INLINE void transpose_4(__m256i row[4], const __m256i x[4]) {
  const __m256i low01 = _mm256_unpacklo_epi32(x[0], x[1]);
  const __m256i high01 = _mm256_unpackhi_epi32(x[0], x[1]);
  const __m256i low23 = _mm256_unpacklo_epi32(x[2], x[3]);
  const __m256i high23 = _mm256_unpackhi_epi32(x[2], x[3]);
  row[0] = _mm256_unpacklo_epi64(low01, low23);
  row[1] = _mm256_unpackhi_epi64(low01, low23);
  row[2] = _mm256_unpacklo_epi64(high01, high23);
  row[3] = _mm256_unpackhi_epi64(high01, high23);
}

INLINE void xor_store(uint8_t* out, const uint8_t* in, size_t at, __m256i stream) {
  const __m256i text = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in + at));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + at), _mm256_xor_si256(stream, text));
}

TARGET void xor_batch(uint8_t* out, const uint8_t* in, const SalsaState& state, uint64_t counter) {
  __m256i x[16];
  spread(x, state, counter);
  make_stream<Eight>(x);
  // Half a block (eight words) after the other, to keep the rows in registers.
  for (size_t half = 0; half < 2; ++half) {
    __m256i left[4], right[4];
    transpose_4(left, x + 8 * half);
    transpose_4(right, x + 8 * half + 4);
    for (size_t b = 0; b < 4; ++b) {
      const size_t at = b * kSalsaBlockNbytes + 32 * half;
      xor_store(out, in, at, _mm256_permute2x128_si256(left[b], right[b], 0x20));
      xor_store(out, in, at + 4 * kSalsaBlockNbytes,
                _mm256_permute2x128_si256(left[b], right[b], 0x31));
    }
  }
}

}  // namespace

void salsa20_xor_avx2(uint8_t* out, const uint8_t* in, size_t nbytes, const SalsaState& state,
                      uint64_t counter) noexcept {
  xor_in_batches<kBlocks, &xor_batch>(out, in, nbytes, state, counter);
}

}  // namespace tensorizer::crypto
#endif
