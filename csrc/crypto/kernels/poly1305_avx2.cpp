// Poly1305 over eight blocks per round with 32-bit multiplication, in five limbs of 26 bits.
//
// Four lanes hold four running sums. Each round does V = V * r^8 + A * r^4 + B, where A and B are
// the next eight blocks, so only one reduction is paid for both; at the end lane j is weighted by
// the power of r that its last block still lacks, and the lanes are added up.
#if defined(__x86_64__)
#include <immintrin.h>

#include "crypto/kernels/poly1305.h"

#define TARGET __attribute__((target("avx2")))
#define INLINE __attribute__((target("avx2"), always_inline)) inline

namespace tensorizer::crypto {
namespace {

constexpr size_t kRoundBlocks = 8;
constexpr size_t kHalfNbytes = 4 * kPolyBlockNbytes;

struct Number {  // four numbers, a limb per register
  __m256i v[5];
};
struct Factor {  // a multiplier; s[i] is 5 * r[i], what comes back from above 2^130
  __m256i r[5], s[5];
};

INLINE __m256i all(uint64_t value) { return _mm256_set1_epi64x(static_cast<long long>(value)); }

INLINE void set_limb(Factor& f, int i, __m256i limb) {
  f.r[i] = limb;
  f.s[i] = _mm256_add_epi64(limb, _mm256_slli_epi64(limb, 2));
}

INLINE Factor factor(const Limbs& power) {
  const Limbs26 r = poly1305_to_26(power);
  Factor f;
  for (int i = 0; i < 5; ++i) set_limb(f, i, all(r[i]));
  return f;
}

// Powers in the order in which load() puts blocks into lanes: 0, 2, 1, 3; block j lacks r^(4 - j).
INLINE Factor lane_factor(const std::array<Limbs, 8>& powers) {
  const Limbs26 r1 = poly1305_to_26(powers[0]), r2 = poly1305_to_26(powers[1]),
                r3 = poly1305_to_26(powers[2]), r4 = poly1305_to_26(powers[3]);
  Factor f;
  for (int i = 0; i < 5; ++i) {
    set_limb(f, i,
             _mm256_setr_epi64x(static_cast<long long>(r4[i]), static_cast<long long>(r2[i]),
                                static_cast<long long>(r3[i]), static_cast<long long>(r1[i])));
  }
  return f;
}

INLINE Number load(const uint8_t* data) {
  const __m256i first = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(data));
  const __m256i second = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(data + 32));
  const __m256i low = _mm256_unpacklo_epi64(first, second);
  const __m256i high = _mm256_unpackhi_epi64(first, second);
  const __m256i mask = all(kMask26);
  const __m256i middle = _mm256_or_si256(_mm256_srli_epi64(low, 52), _mm256_slli_epi64(high, 12));
  return {{_mm256_and_si256(low, mask), _mm256_and_si256(_mm256_srli_epi64(low, 26), mask),
           _mm256_and_si256(middle, mask), _mm256_and_si256(_mm256_srli_epi64(high, 14), mask),
           _mm256_or_si256(_mm256_srli_epi64(high, 40), all(uint64_t{1} << 24))}};
}

INLINE Number add(const Number& a, const Number& b) {
  Number c;
  for (int i = 0; i < 5; ++i) c.v[i] = _mm256_add_epi64(a.v[i], b.v[i]);
  return c;
}

// d += a * f, limb by limb, unreduced. Ten products below 2^57 fit.
INLINE void multiply_add(Number& d, const Number& a, const Factor& f) {
  for (int i = 0; i < 5; ++i) {
    for (int k = 0; k < 5; ++k) {
      const __m256i by = k >= i ? f.r[k - i] : f.s[k - i + 5];
      d.v[k] = _mm256_add_epi64(d.v[k], _mm256_mul_epu32(a.v[i], by));
    }
  }
}

// Moves what is above 26 bits of `from` into `to`.
INLINE void carry(__m256i& from, __m256i& to) {
  to = _mm256_add_epi64(to, _mm256_srli_epi64(from, 26));
  from = _mm256_and_si256(from, all(kMask26));
}

// Two interleaved chains; leaves every limb below 2^26 plus a small carry.
INLINE Number reduce(Number d) {
  carry(d.v[3], d.v[4]);
  carry(d.v[0], d.v[1]);
  const __m256i over = _mm256_srli_epi64(d.v[4], 26);
  d.v[4] = _mm256_and_si256(d.v[4], all(kMask26));
  d.v[0] = _mm256_add_epi64(d.v[0], _mm256_add_epi64(over, _mm256_slli_epi64(over, 2)));
  carry(d.v[1], d.v[2]);
  carry(d.v[0], d.v[1]);
  carry(d.v[2], d.v[3]);
  carry(d.v[3], d.v[4]);
  return d;
}

INLINE Number zero() {
  const __m256i z = _mm256_setzero_si256();
  return {{z, z, z, z, z}};
}

INLINE uint64_t sum(__m256i lanes) {
  alignas(32) uint64_t each[4];
  _mm256_store_si256(reinterpret_cast<__m256i*>(each), lanes);
  return each[0] + each[1] + each[2] + each[3];
}

INLINE __m256i in_lane_0(uint64_t value) {
  return _mm256_setr_epi64x(static_cast<long long>(value), 0, 0, 0);
}

}  // namespace

TARGET void poly1305_blocks_avx2(Poly1305& state, const uint8_t* data, size_t nblocks) noexcept {
  if (nblocks >= kRoundBlocks) {
    const Factor r4 = factor(state.powers[3]), r8 = factor(state.powers[7]);
    const Limbs26 h = poly1305_to_26(state.h);
    // What was absorbed before belongs to the first block, which load() puts into lane 0.
    Number before;
    for (int i = 0; i < 5; ++i) before.v[i] = in_lane_0(h[i]);
    Number d = zero();
    multiply_add(d, add(load(data), before), r4);
    Number v = add(reduce(d), load(data + kHalfNbytes));
    for (data += 2 * kHalfNbytes, nblocks -= kRoundBlocks; nblocks >= kRoundBlocks;
         data += 2 * kHalfNbytes, nblocks -= kRoundBlocks) {
      d = zero();
      multiply_add(d, load(data), r4);
      multiply_add(d, v, r8);
      v = add(reduce(d), load(data + kHalfNbytes));
    }
    d = zero();
    multiply_add(d, v, lane_factor(state.powers));
    v = reduce(d);
    state.h = poly1305_from_26({sum(v.v[0]), sum(v.v[1]), sum(v.v[2]), sum(v.v[3]), sum(v.v[4])});
  }
  poly1305_blocks(state, data, nblocks);
}

}  // namespace tensorizer::crypto
#endif
