// Four Salsa20 blocks at a time: register i holds word i of all four. The sixteen words take half
// of the registers.
#if defined(__aarch64__)
#include <arm_neon.h>

#include "crypto/kernels/salsa20.h"

#define INLINE __attribute__((always_inline)) inline

#include "crypto/kernels/salsa20_rounds.h"

namespace tensorizer::crypto {
namespace {

constexpr size_t kBlocks = 4;

struct Four {
  using Word = uint32x4_t;
  static INLINE Word plus(Word a, Word b) { return vaddq_u32(a, b); }
  template <int kBits>
  static INLINE Word xor_rotated(Word word, Word sum) {
    return veorq_u32(word, vsriq_n_u32(vshlq_n_u32(sum, kBits), sum, 32 - kBits));
  }
};

// The words of the state in four lanes, with the counters `counter` to `counter` + 3.
INLINE void spread(uint32x4_t x[16], const SalsaState& state, uint64_t counter) {
  for (int i = 0; i < 16; ++i) x[i] = vdupq_n_u32(state[i]);
  uint32_t low[kBlocks], high[kBlocks];
  for (uint32_t lane = 0; lane < kBlocks; ++lane) {
    low[lane] = static_cast<uint32_t>(counter + lane);
    high[lane] = static_cast<uint32_t>((counter + lane) >> 32);
  }
  x[8] = vld1q_u32(low);
  x[9] = vld1q_u32(high);
}

// Four words of all blocks to the same four words of one block each: row b is block b.
INLINE void transpose_4(uint64x2_t row[4], const uint32x4_t x[4]) {
  const uint64x2_t low01 = vreinterpretq_u64_u32(vzip1q_u32(x[0], x[1]));
  const uint64x2_t high01 = vreinterpretq_u64_u32(vzip2q_u32(x[0], x[1]));
  const uint64x2_t low23 = vreinterpretq_u64_u32(vzip1q_u32(x[2], x[3]));
  const uint64x2_t high23 = vreinterpretq_u64_u32(vzip2q_u32(x[2], x[3]));
  row[0] = vzip1q_u64(low01, low23);
  row[1] = vzip2q_u64(low01, low23);
  row[2] = vzip1q_u64(high01, high23);
  row[3] = vzip2q_u64(high01, high23);
}

void xor_batch(uint8_t* out, const uint8_t* in, const SalsaState& state,
               uint64_t counter) noexcept {
  uint32x4_t x[16];
  spread(x, state, counter);
  make_stream<Four>(x);
  for (size_t quarter = 0; quarter < 4; ++quarter) {
    uint64x2_t row[4];
    transpose_4(row, x + 4 * quarter);
    for (size_t block = 0; block < kBlocks; ++block) {
      const size_t at = block * kSalsaBlockNbytes + 16 * quarter;
      vst1q_u8(out + at, veorq_u8(vreinterpretq_u8_u64(row[block]), vld1q_u8(in + at)));
    }
  }
}

}  // namespace

void salsa20_xor_neon(uint8_t* out, const uint8_t* in, size_t nbytes, const SalsaState& state,
                      uint64_t counter) noexcept {
  xor_in_batches<kBlocks, &xor_batch>(out, in, nbytes, state, counter);
}

}  // namespace tensorizer::crypto
#endif
