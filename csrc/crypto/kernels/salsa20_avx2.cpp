// Eight Salsa20 blocks at a time: register i holds word i of all eight. Sixteen words fill all
// sixteen registers, so the compiler spills a few; that costs less than shuffling words of fewer
// blocks would.
#if defined(__x86_64__)
#include <immintrin.h>

#include "crypto/kernels/salsa20.h"

#define TARGET __attribute__((target("avx2")))
#define INLINE __attribute__((target("avx2"), always_inline)) inline

namespace tensorizer::crypto {
namespace {

constexpr size_t kBlocks = 8;

template <int kBits>
INLINE __m256i xor_rotated(__m256i target, __m256i sum) {
  target = _mm256_xor_si256(target, _mm256_slli_epi32(sum, kBits));
  return _mm256_xor_si256(target, _mm256_srli_epi32(sum, 32 - kBits));
}

INLINE void quarter_round(__m256i& a, __m256i& b, __m256i& c, __m256i& d) {
  b = xor_rotated<7>(b, _mm256_add_epi32(a, d));
  c = xor_rotated<9>(c, _mm256_add_epi32(b, a));
  d = xor_rotated<13>(d, _mm256_add_epi32(c, b));
  a = xor_rotated<18>(a, _mm256_add_epi32(d, c));
}

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

INLINE void run_rounds(__m256i x[16]) {
  for (int i = 0; i < 10; ++i) {
    quarter_round(x[0], x[4], x[8], x[12]);
    quarter_round(x[5], x[9], x[13], x[1]);
    quarter_round(x[10], x[14], x[2], x[6]);
    quarter_round(x[15], x[3], x[7], x[11]);
    quarter_round(x[0], x[1], x[2], x[3]);
    quarter_round(x[5], x[6], x[7], x[4]);
    quarter_round(x[10], x[11], x[8], x[9]);
    quarter_round(x[15], x[12], x[13], x[14]);
  }
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
  __m256i start[16], x[16];
  spread(start, state, counter);
  for (int i = 0; i < 16; ++i) x[i] = start[i];
  run_rounds(x);
  for (int i = 0; i < 16; ++i) x[i] = _mm256_add_epi32(x[i], start[i]);
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
