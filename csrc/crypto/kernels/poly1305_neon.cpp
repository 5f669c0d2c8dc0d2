// Poly1305 over four blocks per round with 32-bit multiplication, in five limbs of 26 bits.
//
// Two lanes hold two running sums. Each round does V = V * r^4 + A * r^2 + B, where A and B are the
// next four blocks, so only one reduction is paid for both; at the end lane j is weighted by the
// power of r that its last block still lacks, and the lanes are added up.
#if defined(__aarch64__)
#include <arm_neon.h>

#include "crypto/kernels/poly1305.h"

#define INLINE __attribute__((always_inline)) inline

namespace tensorizer::crypto {
namespace {

constexpr size_t kRoundBlocks = 4;
constexpr size_t kHalfNbytes = 2 * kPolyBlockNbytes;

struct Number {  // two numbers, a limb per register
  uint64x2_t v[5];
};
struct Factor {  // a multiplier; s[i] is 5 * r[i], what comes back from above 2^130
  uint32x2_t r[5], s[5];
};

// Block 0 of two is in lane 0 and lacks the power `first`, block 1 the power `second`.
INLINE Factor factor(const Limbs& first, const Limbs& second) {
  const Limbs26 a = poly1305_to_26(first), b = poly1305_to_26(second);
  Factor f;
  for (int i = 0; i < 5; ++i) {
    const uint32x2_t limb = vcreate_u32(a[i] | (b[i] << 32));
    f.r[i] = limb;
    f.s[i] = vadd_u32(limb, vshl_n_u32(limb, 2));
  }
  return f;
}

INLINE uint64x2_t all(uint64_t value) { return vdupq_n_u64(value); }

INLINE Number load(const uint8_t* data) {
  const uint64x2_t first = vreinterpretq_u64_u8(vld1q_u8(data));
  const uint64x2_t second = vreinterpretq_u64_u8(vld1q_u8(data + kPolyBlockNbytes));
  const uint64x2_t low = vzip1q_u64(first, second), high = vzip2q_u64(first, second);
  const uint64x2_t mask = all(kMask26);
  const uint64x2_t middle = vorrq_u64(vshrq_n_u64(low, 52), vshlq_n_u64(high, 12));
  return {{vandq_u64(low, mask), vandq_u64(vshrq_n_u64(low, 26), mask), vandq_u64(middle, mask),
           vandq_u64(vshrq_n_u64(high, 14), mask),
           vorrq_u64(vshrq_n_u64(high, 40), all(uint64_t{1} << 24))}};
}

INLINE Number add(const Number& a, const Number& b) {
  Number c;
  for (int i = 0; i < 5; ++i) c.v[i] = vaddq_u64(a.v[i], b.v[i]);
  return c;
}

// d += a * f, limb by limb, unreduced. Limbs of `a` are below 2^32; ten products below 2^57 fit.
INLINE void multiply_add(Number& d, const Number& a, const Factor& f) {
  for (int i = 0; i < 5; ++i) {
    const uint32x2_t limb = vmovn_u64(a.v[i]);
    for (int k = 0; k < 5; ++k) {
      d.v[k] = vmlal_u32(d.v[k], limb, k >= i ? f.r[k - i] : f.s[k - i + 5]);
    }
  }
}

// Moves what is above 26 bits of `from` into `to`.
INLINE void carry(uint64x2_t& from, uint64x2_t& to) {
  to = vsraq_n_u64(to, from, 26);
  from = vandq_u64(from, all(kMask26));
}

// Two interleaved chains; leaves every limb below 2^26 plus a small carry.
INLINE Number reduce(Number d) {
  carry(d.v[3], d.v[4]);
  carry(d.v[0], d.v[1]);
  const uint64x2_t over = vshrq_n_u64(d.v[4], 26);
  d.v[4] = vandq_u64(d.v[4], all(kMask26));
  d.v[0] = vaddq_u64(d.v[0], vaddq_u64(over, vshlq_n_u64(over, 2)));
  carry(d.v[1], d.v[2]);
  carry(d.v[0], d.v[1]);
  carry(d.v[2], d.v[3]);
  carry(d.v[3], d.v[4]);
  return d;
}

INLINE Number zero() { return {{all(0), all(0), all(0), all(0), all(0)}}; }

}  // namespace

void poly1305_blocks_neon(Poly1305& state, const uint8_t* data, size_t nblocks) noexcept {
  if (nblocks >= kRoundBlocks) {
    const auto& powers = state.powers;  // powers[i] is r^(i + 1)
    const Factor r2 = factor(powers[1], powers[1]), r4 = factor(powers[3], powers[3]);
    const Limbs26 h = poly1305_to_26(state.h);
    // What was absorbed before belongs to the first block.
    Number before;
    for (int i = 0; i < 5; ++i) before.v[i] = vcombine_u64(vcreate_u64(h[i]), vcreate_u64(0));
    Number d = zero();
    multiply_add(d, add(load(data), before), r2);
    Number v = add(reduce(d), load(data + kHalfNbytes));
    for (data += 2 * kHalfNbytes, nblocks -= kRoundBlocks; nblocks >= kRoundBlocks;
         data += 2 * kHalfNbytes, nblocks -= kRoundBlocks) {
      d = zero();
      multiply_add(d, load(data), r2);
      multiply_add(d, v, r4);
      v = add(reduce(d), load(data + kHalfNbytes));
    }
    d = zero();
    multiply_add(d, v, factor(powers[1], powers[0]));
    v = reduce(d);
    Limbs26 sums;
    for (int i = 0; i < 5; ++i) sums[i] = vaddvq_u64(v.v[i]);
    state.h = poly1305_from_26(sums);
  }
  poly1305_blocks(state, data, nblocks);
}

}  // namespace tensorizer::crypto
#endif
