// A 16x16 (or 8x8) transposition of message words brings word i of all messages into register i.
// From there on the algorithm is the textbook's, with one instruction for each rotation and for
// each function of three words.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
// GCC 12 and 13 warn about the deliberately undefined operand of their own intrinsics (GCC bug
// 105593).
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#if defined(__x86_64__)

#include <immintrin.h>

#include <utility>

#include "core/cpu_features.h"
#include "digest/sha256_kernels.h"

#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl")))
#define INLINE __attribute__((target("avx512f,avx512bw,avx512vl"), always_inline)) inline

namespace tensorizer::digest {
namespace {

// The messages lie in memory, too many of them for the processor to foresee all of their next
// blocks. 4 blocks ahead measured best.
constexpr size_t kAheadNbytes = 4 * kSha256BlockNbytes;

// Immediate operands of vpternlogd: the results for the eight combinations of three bits.
constexpr int kXor3 = 0x96, kChoose = 0xCA, kMajority = 0xE8;

INLINE __m128i big_endian() { return _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203); }

struct Wide {
  using Words = __m512i;  // one of each message
  static constexpr size_t kLanes = 16;

  INLINE static Words load(const void* from) { return _mm512_loadu_si512(from); }
  INLINE static void store(void* to, Words a) { _mm512_storeu_si512(to, a); }
  INLINE static Words all(uint32_t word) { return _mm512_set1_epi32(static_cast<int>(word)); }
  INLINE static Words add(Words a, Words b) { return _mm512_add_epi32(a, b); }
  template <int kBits>
  INLINE static Words rotate(Words a) {
    return _mm512_ror_epi32(a, kBits);
  }
  template <int kBits>
  INLINE static Words shift(Words a) {
    return _mm512_srli_epi32(a, kBits);
  }
  template <int kFunction>
  INLINE static Words combine(Words a, Words b, Words c) {
    return _mm512_ternarylogic_epi32(a, b, c, kFunction);
  }

  INLINE static void load_block(Words words[16], const std::byte* const* at) {
    const Words swap = _mm512_broadcast_i32x4(big_endian());
    Words t[16];  // quarter q of t[4 * g + j] is word 4 * q + j of messages 4 * g to 4 * g + 3
    for (size_t g = 0; g < 16; g += 4) {
      const Words row0 = load(at[g]), row1 = load(at[g + 1]);
      const Words row2 = load(at[g + 2]), row3 = load(at[g + 3]);
      const Words low01 = _mm512_unpacklo_epi32(row0, row1);
      const Words high01 = _mm512_unpackhi_epi32(row0, row1);
      const Words low23 = _mm512_unpacklo_epi32(row2, row3);
      const Words high23 = _mm512_unpackhi_epi32(row2, row3);
      t[g] = _mm512_unpacklo_epi64(low01, low23);
      t[g + 1] = _mm512_unpackhi_epi64(low01, low23);
      t[g + 2] = _mm512_unpacklo_epi64(high01, high23);
      t[g + 3] = _mm512_unpackhi_epi64(high01, high23);
    }
    for (size_t j = 0; j < 4; ++j) {
      const Words low_a = _mm512_shuffle_i32x4(t[j], t[4 + j], 0x44);
      const Words high_a = _mm512_shuffle_i32x4(t[j], t[4 + j], 0xEE);
      const Words low_b = _mm512_shuffle_i32x4(t[8 + j], t[12 + j], 0x44);
      const Words high_b = _mm512_shuffle_i32x4(t[8 + j], t[12 + j], 0xEE);
      words[j] = _mm512_shuffle_epi8(_mm512_shuffle_i32x4(low_a, low_b, 0x88), swap);
      words[4 + j] = _mm512_shuffle_epi8(_mm512_shuffle_i32x4(low_a, low_b, 0xDD), swap);
      words[8 + j] = _mm512_shuffle_epi8(_mm512_shuffle_i32x4(high_a, high_b, 0x88), swap);
      words[12 + j] = _mm512_shuffle_epi8(_mm512_shuffle_i32x4(high_a, high_b, 0xDD), swap);
    }
  }
};

struct Half {
  using Words = __m256i;
  static constexpr size_t kLanes = 8;

  INLINE static Words load(const void* from) {
    return _mm256_loadu_si256(static_cast<const Words*>(from));
  }
  INLINE static void store(void* to, Words a) { _mm256_storeu_si256(static_cast<Words*>(to), a); }
  INLINE static Words all(uint32_t word) { return _mm256_set1_epi32(static_cast<int>(word)); }
  INLINE static Words add(Words a, Words b) { return _mm256_add_epi32(a, b); }
  template <int kBits>
  INLINE static Words rotate(Words a) {
    return _mm256_ror_epi32(a, kBits);
  }
  template <int kBits>
  INLINE static Words shift(Words a) {
    return _mm256_srli_epi32(a, kBits);
  }
  template <int kFunction>
  INLINE static Words combine(Words a, Words b, Words c) {
    return _mm256_ternarylogic_epi32(a, b, c, kFunction);
  }

  INLINE static void load_block(Words words[16], const std::byte* const* at) {
    const Words swap = _mm256_broadcastsi128_si256(big_endian());
    for (size_t half = 0; half < 2; ++half) {
      Words t[8];  // half h of t[4 * g + j] is word 4 * h + j of messages 4 * g to 4 * g + 3
      for (size_t g = 0; g < 8; g += 4) {
        const Words row0 = load(at[g] + 32 * half), row1 = load(at[g + 1] + 32 * half);
        const Words row2 = load(at[g + 2] + 32 * half), row3 = load(at[g + 3] + 32 * half);
        const Words low01 = _mm256_unpacklo_epi32(row0, row1);
        const Words high01 = _mm256_unpackhi_epi32(row0, row1);
        const Words low23 = _mm256_unpacklo_epi32(row2, row3);
        const Words high23 = _mm256_unpackhi_epi32(row2, row3);
        t[g] = _mm256_unpacklo_epi64(low01, low23);
        t[g + 1] = _mm256_unpackhi_epi64(low01, low23);
        t[g + 2] = _mm256_unpacklo_epi64(high01, high23);
        t[g + 3] = _mm256_unpackhi_epi64(high01, high23);
      }
      for (size_t j = 0; j < 4; ++j) {
        const Words low = _mm256_permute2x128_si256(t[j], t[4 + j], 0x20);
        const Words high = _mm256_permute2x128_si256(t[j], t[4 + j], 0x31);
        words[8 * half + j] = _mm256_shuffle_epi8(low, swap);
        words[8 * half + 4 + j] = _mm256_shuffle_epi8(high, swap);
      }
    }
  }
};

// The registers keep their places while the letters of the standard move on by one each round.
template <typename Vector, size_t kRound>
INLINE void one_round(typename Vector::Words state[8], typename Vector::Words words[16]) {
  using Words = typename Vector::Words;
  const auto letter = [](size_t number) { return (64 + number - kRound) % 8; };
  Words& word = words[kRound % 16];
  if constexpr (kRound >= 16) {
    const Words w1 = words[(kRound + 1) % 16], w14 = words[(kRound + 14) % 16];
    const Words sigma0 = Vector::template combine<kXor3>(Vector::template rotate<7>(w1),
                                                         Vector::template rotate<18>(w1),
                                                         Vector::template shift<3>(w1));
    const Words sigma1 = Vector::template combine<kXor3>(Vector::template rotate<17>(w14),
                                                         Vector::template rotate<19>(w14),
                                                         Vector::template shift<10>(w14));
    word = Vector::add(Vector::add(word, words[(kRound + 9) % 16]), Vector::add(sigma0, sigma1));
  }
  const Words a = state[letter(0)], b = state[letter(1)], c = state[letter(2)];
  const Words e = state[letter(4)], f = state[letter(5)], g = state[letter(6)];
  Words& d = state[letter(3)];
  Words& h = state[letter(7)];
  const Words sum1 =
      Vector::template combine<kXor3>(Vector::template rotate<6>(e), Vector::template rotate<11>(e),
                                      Vector::template rotate<25>(e));
  const Words chosen = Vector::template combine<kChoose>(e, f, g);
  const Words fixed = Vector::add(Vector::add(h, Vector::all(kRoundConstants[kRound])), word);
  const Words t1 = Vector::add(fixed, Vector::add(sum1, chosen));
  const Words sum0 =
      Vector::template combine<kXor3>(Vector::template rotate<2>(a), Vector::template rotate<13>(a),
                                      Vector::template rotate<22>(a));
  const Words majority = Vector::template combine<kMajority>(a, b, c);
  d = Vector::add(d, t1);
  h = Vector::add(t1, Vector::add(sum0, majority));
}

template <typename Vector, size_t... kRounds>
INLINE void all_rounds(typename Vector::Words state[8], typename Vector::Words words[16],
                       std::index_sequence<kRounds...>) {
  (one_round<Vector, kRounds>(state, words), ...);
}

template <typename Vector>
INLINE void absorb(const BlockRun* runs, size_t count, size_t nblocks) {
  using Words = typename Vector::Words;
  constexpr size_t kLanes = Vector::kLanes;
  const std::byte* at[kLanes];
  alignas(64) uint32_t letters[8][kLanes];
  for (size_t lane = 0; lane < kLanes; ++lane) {
    const BlockRun& run = runs[lane < count ? lane : 0];  // an idle lane repeats the first one
    at[lane] = run.data;
    for (size_t i = 0; i < 8; ++i) letters[i][lane] = run.state[i];
  }
  Words state[8];
  for (size_t i = 0; i < 8; ++i) state[i] = Vector::load(letters[i]);
  for (; nblocks > 0; --nblocks) {
    Words words[16], before[8];
    Vector::load_block(words, at);
    for (const std::byte*& next : at) {
      next += kSha256BlockNbytes;
      __builtin_prefetch(next + kAheadNbytes - kSha256BlockNbytes);
    }
    for (size_t i = 0; i < 8; ++i) before[i] = state[i];
    all_rounds<Vector>(state, words, std::make_index_sequence<64>{});
    for (size_t i = 0; i < 8; ++i) state[i] = Vector::add(state[i], before[i]);
  }
  for (size_t i = 0; i < 8; ++i) Vector::store(letters[i], state[i]);
  for (size_t lane = 0; lane < count; ++lane)
    for (size_t i = 0; i < 8; ++i) runs[lane].state[i] = letters[i][lane];
}

}  // namespace

bool sha_lanes_supported() noexcept {
  const CpuFeatures& cpu = cpu_features();
  return cpu.avx512f && cpu.avx512bw && cpu.avx512vl;
}

TARGET void sha_absorb_16(const BlockRun* runs, size_t count, size_t nblocks) noexcept {
  absorb<Wide>(runs, count, nblocks);
}

TARGET void sha_absorb_8(const BlockRun* runs, size_t count, size_t nblocks) noexcept {
  absorb<Half>(runs, count, nblocks);
}

}  // namespace tensorizer::digest

#else  // other processors have no such kernel

#include "digest/sha256_kernels.h"

namespace tensorizer::digest {

bool sha_lanes_supported() noexcept { return false; }
void sha_absorb_16(const BlockRun*, size_t, size_t) noexcept {}
void sha_absorb_8(const BlockRun*, size_t, size_t) noexcept {}

}  // namespace tensorizer::digest

#endif
