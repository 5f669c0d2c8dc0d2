// Poly1305 over sixteen blocks per round with 52-bit multiply-add.
//
// Eight lanes hold eight running sums. Each round does V = V * r^16 + A * r^8 + B, where A and B
// are the next sixteen blocks, so only one reduction is paid for both; at the end lane j is
// weighted by the power of r that its last block still lacks, and the lanes are added up.
#if defined(__x86_64__)
#if defined(__GNUC__) && !defined(__clang__)
// GCC 12 and 13 warn about the deliberately undefined operand of their own intrinsics (GCC bug
// 105593).
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>

#include "crypto/kernels/poly1305.h"

#define TARGET __attribute__((target("avx512f,avx512ifma")))
#define INLINE __attribute__((target("avx512f,avx512ifma"), always_inline)) inline

namespace tensorizer::crypto {
namespace {

constexpr size_t kRoundBlocks = 16;
constexpr size_t kHalfNbytes = 8 * kPolyBlockNbytes;

struct Number {  // eight numbers, a limb per register
  __m512i v0, v1, v2;
};
struct Factor {  // a multiplier, with the limbs that come back from above 2^130 already times 20
  __m512i r0, r1, r2, s1, s2;
};
struct Product {  // low and high halves of 104-bit sums; high ones weigh 2^52 more
  __m512i lo0, lo1, lo2, hi0, hi1, hi2;
};

INLINE __m512i all(uint64_t value) { return _mm512_set1_epi64(static_cast<long long>(value)); }

INLINE __m512i times20(__m512i r) {
  return _mm512_add_epi64(_mm512_slli_epi64(r, 4), _mm512_slli_epi64(r, 2));
}

INLINE Factor factor(__m512i r0, __m512i r1, __m512i r2) {
  return {r0, r1, r2, times20(r1), times20(r2)};
}

INLINE Factor factor(const Limbs& r) { return factor(all(r[0]), all(r[1]), all(r[2])); }

// Powers in the order in which load() puts blocks into lanes: 0, 4, 1, 5, 2, 6, 3, 7; block j lacks
// r^(8 - j).
INLINE Factor lane_factor(const std::array<Limbs, 8>& powers) {
  constexpr int kPower[8] = {8, 4, 7, 3, 6, 2, 5, 1};
  alignas(64) uint64_t limbs[3][8];
  for (int lane = 0; lane < 8; ++lane) {
    for (int limb = 0; limb < 3; ++limb) limbs[limb][lane] = powers[kPower[lane] - 1][limb];
  }
  return factor(_mm512_load_si512(limbs[0]), _mm512_load_si512(limbs[1]),
                _mm512_load_si512(limbs[2]));
}

INLINE Number load(const uint8_t* data) {
  const __m512i first = _mm512_loadu_si512(data), second = _mm512_loadu_si512(data + 64);
  const __m512i low = _mm512_unpacklo_epi64(first, second);
  const __m512i high = _mm512_unpackhi_epi64(first, second);
  const __m512i middle = _mm512_or_si512(_mm512_srli_epi64(low, 44), _mm512_slli_epi64(high, 20));
  return {_mm512_and_si512(low, all(kMask44)), _mm512_and_si512(middle, all(kMask44)),
          _mm512_or_si512(_mm512_srli_epi64(high, 24), all(uint64_t{1} << 40))};
}

INLINE Number add(const Number& a, const Number& b) {
  return {_mm512_add_epi64(a.v0, b.v0), _mm512_add_epi64(a.v1, b.v1), _mm512_add_epi64(a.v2, b.v2)};
}

INLINE void multiply_add(Product& p, const Number& a, const Factor& f) {
  p.lo0 = _mm512_madd52lo_epu64(p.lo0, a.v0, f.r0);
  p.hi0 = _mm512_madd52hi_epu64(p.hi0, a.v0, f.r0);
  p.lo1 = _mm512_madd52lo_epu64(p.lo1, a.v0, f.r1);
  p.hi1 = _mm512_madd52hi_epu64(p.hi1, a.v0, f.r1);
  p.lo2 = _mm512_madd52lo_epu64(p.lo2, a.v0, f.r2);
  p.hi2 = _mm512_madd52hi_epu64(p.hi2, a.v0, f.r2);
  p.lo0 = _mm512_madd52lo_epu64(p.lo0, a.v1, f.s2);
  p.hi0 = _mm512_madd52hi_epu64(p.hi0, a.v1, f.s2);
  p.lo1 = _mm512_madd52lo_epu64(p.lo1, a.v1, f.r0);
  p.hi1 = _mm512_madd52hi_epu64(p.hi1, a.v1, f.r0);
  p.lo2 = _mm512_madd52lo_epu64(p.lo2, a.v1, f.r1);
  p.hi2 = _mm512_madd52hi_epu64(p.hi2, a.v1, f.r1);
  p.lo0 = _mm512_madd52lo_epu64(p.lo0, a.v2, f.s1);
  p.hi0 = _mm512_madd52hi_epu64(p.hi0, a.v2, f.s1);
  p.lo1 = _mm512_madd52lo_epu64(p.lo1, a.v2, f.s2);
  p.hi1 = _mm512_madd52hi_epu64(p.hi1, a.v2, f.s2);
  p.lo2 = _mm512_madd52lo_epu64(p.lo2, a.v2, f.r0);
  p.hi2 = _mm512_madd52hi_epu64(p.hi2, a.v2, f.r0);
}

// Low halves are below 6 * 2^52 and high ones below 2^45, so no sum here reaches 2^60.
INLINE Number reduce(const Product& p) {
  const __m512i mask44 = all(kMask44), mask42 = all(kMask42);
  // 2^(44 k + 52) is 2^8 in the next limb; 2^(88 + 52) is 5 * 2^10 in limb 0.
  const __m512i d1 = _mm512_add_epi64(p.lo1, _mm512_slli_epi64(p.hi0, 8));
  const __m512i d2 = _mm512_add_epi64(p.lo2, _mm512_slli_epi64(p.hi1, 8));
  const __m512i e1 = _mm512_add_epi64(d1, _mm512_srli_epi64(p.lo0, 44));
  const __m512i e2 = _mm512_add_epi64(d2, _mm512_srli_epi64(e1, 44));
  const __m512i over = _mm512_add_epi64(_mm512_srli_epi64(e2, 42), _mm512_slli_epi64(p.hi2, 10));
  const __m512i over5 = _mm512_add_epi64(over, _mm512_slli_epi64(over, 2));
  const __m512i e0 = _mm512_add_epi64(_mm512_and_si512(p.lo0, mask44), over5);
  return {_mm512_and_si512(e0, mask44),
          _mm512_add_epi64(_mm512_and_si512(e1, mask44), _mm512_srli_epi64(e0, 44)),
          _mm512_and_si512(e2, mask42)};
}

INLINE Product zero() {
  const __m512i z = _mm512_setzero_si512();
  return {z, z, z, z, z, z};
}

INLINE uint64_t sum(__m512i lanes) { return static_cast<uint64_t>(_mm512_reduce_add_epi64(lanes)); }

INLINE __m512i in_lane_0(uint64_t value) {
  return _mm512_zextsi128_si512(_mm_cvtsi64_si128(static_cast<long long>(value)));
}

}  // namespace

TARGET void poly1305_blocks_ifma(Poly1305& state, const uint8_t* data, size_t nblocks) noexcept {
  if (nblocks >= kRoundBlocks) {
    const Factor r8 = factor(state.powers[7]), r16 = factor(state.power16);
    const Limbs& h = state.h;
    // What was absorbed before belongs to the first block, which load() puts into lane 0.
    const Number before{in_lane_0(h[0]), in_lane_0(h[1]), in_lane_0(h[2])};
    Product p = zero();
    multiply_add(p, add(load(data), before), r8);
    Number v = add(reduce(p), load(data + kHalfNbytes));
    for (data += 2 * kHalfNbytes, nblocks -= kRoundBlocks; nblocks >= kRoundBlocks;
         data += 2 * kHalfNbytes, nblocks -= kRoundBlocks) {
      p = zero();
      multiply_add(p, load(data), r8);
      multiply_add(p, v, r16);
      v = add(reduce(p), load(data + kHalfNbytes));
    }
    p = zero();
    multiply_add(p, v, lane_factor(state.powers));
    v = reduce(p);
    state.h = poly1305_carried({sum(v.v0), sum(v.v1), sum(v.v2)});
  }
  poly1305_blocks(state, data, nblocks);
}

}  // namespace tensorizer::crypto
#endif
