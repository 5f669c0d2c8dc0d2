// Sixteen Salsa20 blocks at a time: register i holds word i of all sixteen, so that rounds need no
// shuffles and a rotation is one instruction. A transposition at the end brings each block's words
// together.
#if defined(__x86_64__)
#if defined(__GNUC__) && !defined(__clang__)
// GCC 12 and 13 warn about the deliberately undefined operand of their own intrinsics (GCC bug
// 105593).
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>

#include "crypto/kernels/salsa20.h"

#define TARGET __attribute__((target("avx512f")))
#define INLINE __attribute__((target("avx512f"), always_inline)) inline

#include "crypto/kernels/salsa20_rounds.h"

namespace tensorizer::crypto {
namespace {

constexpr size_t kBlocks = 16;

struct Sixteen {
  using Word = __m512i;
  static INLINE Word plus(Word a, Word b) { return _mm512_add_epi32(a, b); }
  template <int kBits>
  static INLINE Word xor_rotated(Word word, Word sum) {
    return _mm512_xor_si512(word, _mm512_rol_epi32(sum, kBits));
  }
};

// The words of the state in sixteen lanes, with the counters `counter` to `counter` + 15.
INLINE void spread(__m512i x[16], const SalsaState& state, uint64_t counter) {
  for (int i = 0; i < 16; ++i) x[i] = _mm512_set1_epi32(static_cast<int>(state[i]));
  const __m512i base = _mm512_set1_epi64(static_cast<long long>(counter));
  const __m512i low8 = _mm512_add_epi64(base, _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7));
  const __m512i high8 = _mm512_add_epi64(base, _mm512_setr_epi64(8, 9, 10, 11, 12, 13, 14, 15));
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i odd = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
  x[8] = _mm512_permutex2var_epi32(low8, even, high8);
  x[9] = _mm512_permutex2var_epi32(low8, odd, high8);
}

// Four words of all blocks to the same four words of four blocks each: quarter q of row b is block
// 4 * q + b.
INLINE void transpose_4(__m512i row[4], const __m512i x[4]) {
  const __m512i low01 = _mm512_unpacklo_epi32(x[0], x[1]);
  const __m512i high01 = _mm512_unpackhi_epi32(x[0], x[1]);
  const __m512i low23 = _mm512_unpacklo_epi32(x[2], x[3]);
  const __m512i high23 = _mm512_unpackhi_epi32(x[2], x[3]);
  row[0] = _mm512_unpacklo_epi64(low01, low23);
  row[1] = _mm512_unpackhi_epi64(low01, low23);
  row[2] = _mm512_unpacklo_epi64(high01, high23);
  row[3] = _mm512_unpackhi_epi64(high01, high23);
}

INLINE void xor_store(uint8_t* out, const uint8_t* in, size_t block, __m512i stream) {
  const size_t at = block * kSalsaBlockNbytes;
  _mm512_storeu_si512(out + at, _mm512_xor_si512(stream, _mm512_loadu_si512(in + at)));
}

TARGET void xor_batch(uint8_t* out, const uint8_t* in, const SalsaState& state, uint64_t counter) {
  __m512i x[16], rows[4][4];
  spread(x, state, counter);
  make_stream<Sixteen>(x);
  for (int i = 0; i < 4; ++i) transpose_4(rows[i], x + 4 * i);
  for (size_t b = 0; b < 4; ++b) {
    // Rows 0 to 3 hold words 0-3, 4-7, 8-11, 12-15 of blocks b, 4 + b, 8 + b, 12 + b.
    const __m512i a01 = _mm512_shuffle_i32x4(rows[0][b], rows[1][b], 0x44);
    const __m512i a23 = _mm512_shuffle_i32x4(rows[0][b], rows[1][b], 0xEE);
    const __m512i b01 = _mm512_shuffle_i32x4(rows[2][b], rows[3][b], 0x44);
    const __m512i b23 = _mm512_shuffle_i32x4(rows[2][b], rows[3][b], 0xEE);
    xor_store(out, in, b, _mm512_shuffle_i32x4(a01, b01, 0x88));
    xor_store(out, in, 4 + b, _mm512_shuffle_i32x4(a01, b01, 0xDD));
    xor_store(out, in, 8 + b, _mm512_shuffle_i32x4(a23, b23, 0x88));
    xor_store(out, in, 12 + b, _mm512_shuffle_i32x4(a23, b23, 0xDD));
  }
}

}  // namespace

void salsa20_xor_avx512(uint8_t* out, const uint8_t* in, size_t nbytes, const SalsaState& state,
                        uint64_t counter) noexcept {
  xor_in_batches<kBlocks, &xor_batch>(out, in, nbytes, state, counter);
}

}  // namespace tensorizer::crypto
#endif
