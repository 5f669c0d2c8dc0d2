#define OPENSSL_SUPPRESS_DEPRECATED  // the newer interface does not reach the block function

#include <openssl/sha.h>

#include <algorithm>

namespace tensorizer::digest {

void openssl_absorb(uint32_t* state, const std::byte* data, size_t nblocks) noexcept {
  SHA256_CTX context{};
  context.md_len = SHA256_DIGEST_LENGTH;
  std::copy_n(state, 8, context.h);
  SHA256_Update(&context, data, nblocks * 64);  // whole blocks: nothing is buffered
  std::copy_n(context.h, 8, state);
}

}  // namespace tensorizer::digest

#if defined(__x86_64__)

#include <cpuid.h>
#include <immintrin.h>

#include <utility>

#include "core/cpu_features.h"
#include "digest/sha256_kernels.h"

#define TENSORIZER_SHA_NI __attribute__((target("sha,sse4.1"), always_inline)) inline

namespace tensorizer::digest {
namespace {

// One message: its state in the order the instructions want, and the last sixteen schedule words.
struct Lane {
  __m128i abef, cdgh;
  __m128i words[4];
};

TENSORIZER_SHA_NI void load_state(Lane& lane, const uint32_t* state) noexcept {
  const __m128i dcba = _mm_loadu_si128(reinterpret_cast<const __m128i*>(state));
  const __m128i hgfe = _mm_loadu_si128(reinterpret_cast<const __m128i*>(state + 4));
  const __m128i cdab = _mm_shuffle_epi32(dcba, 0xB1);
  const __m128i efgh = _mm_shuffle_epi32(hgfe, 0x1B);
  lane.abef = _mm_alignr_epi8(cdab, efgh, 8);
  lane.cdgh = _mm_blend_epi16(efgh, cdab, 0xF0);
}

TENSORIZER_SHA_NI void store_state(const Lane& lane, uint32_t* state) noexcept {
  const __m128i feba = _mm_shuffle_epi32(lane.abef, 0x1B);
  const __m128i dchg = _mm_shuffle_epi32(lane.cdgh, 0xB1);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(state), _mm_blend_epi16(feba, dchg, 0xF0));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(state + 4), _mm_alignr_epi8(dchg, feba, 8));
}

// Rounds 4 * kGroup ... 4 * kGroup + 3.
template <size_t kGroup>
TENSORIZER_SHA_NI void four_rounds(Lane& lane, const std::byte* block) noexcept {
  __m128i& words = lane.words[kGroup % 4];
  if constexpr (kGroup < 4) {
    const __m128i big_endian = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
    words = _mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(block) + kGroup),
                             big_endian);
  } else {
    const __m128i previous = lane.words[(kGroup + 3) % 4];
    const __m128i sevenths = _mm_alignr_epi8(previous, lane.words[(kGroup + 2) % 4], 4);
    const __m128i partial =
        _mm_add_epi32(_mm_sha256msg1_epu32(words, lane.words[(kGroup + 1) % 4]), sevenths);
    words = _mm_sha256msg2_epu32(partial, previous);
  }
  const __m128i constants =
      _mm_load_si128(reinterpret_cast<const __m128i*>(kRoundConstants) + kGroup);
  const __m128i sums = _mm_add_epi32(words, constants);
  lane.cdgh = _mm_sha256rnds2_epu32(lane.cdgh, lane.abef, sums);
  lane.abef = _mm_sha256rnds2_epu32(lane.abef, lane.cdgh, _mm_shuffle_epi32(sums, 0x0E));
}

// The instructions of both lanes alternate group by group.
template <size_t... kGroups>
TENSORIZER_SHA_NI void all_rounds(Lane& lane, const std::byte* block,
                                  std::index_sequence<kGroups...>) noexcept {
  (four_rounds<kGroups>(lane, block), ...);
}

template <size_t... kGroups>
TENSORIZER_SHA_NI void all_rounds_pair(Lane& a, const std::byte* block_a, Lane& b,
                                       const std::byte* block_b,
                                       std::index_sequence<kGroups...>) noexcept {
  ((four_rounds<kGroups>(a, block_a), four_rounds<kGroups>(b, block_b)), ...);
}

using Groups = std::make_index_sequence<16>;

TENSORIZER_SHA_NI void add_state(Lane& lane, __m128i abef, __m128i cdgh) noexcept {
  lane.abef = _mm_add_epi32(lane.abef, abef);
  lane.cdgh = _mm_add_epi32(lane.cdgh, cdgh);
}

__attribute__((target("avx"))) void zero_upper_halves() noexcept { _mm256_zeroupper(); }

// The SHA instructions know no AVX encoding. With upper halves in use each of them takes thousands
// of cycles on some processors, so this function clears them itself.
void leave_avx_state() noexcept {
  if (cpu_features().avx) zero_upper_halves();
}

}  // namespace

bool sha_instructions_supported() noexcept {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  constexpr unsigned kShaBit = 1u << 29;
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0 || (ebx & kShaBit) == 0) return false;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_SSE4_1) != 0;
}

__attribute__((target("sha,sse4.1"))) void sha_instructions_absorb(uint32_t* state,
                                                                   const std::byte* data,
                                                                   size_t nblocks) noexcept {
  leave_avx_state();
  Lane lane;
  load_state(lane, state);
  for (; nblocks > 0; --nblocks, data += 64) {
    const __m128i abef = lane.abef, cdgh = lane.cdgh;
    all_rounds(lane, data, Groups{});
    add_state(lane, abef, cdgh);
  }
  store_state(lane, state);
}

__attribute__((target("sha,sse4.1"))) void sha_instructions_absorb_pair(uint32_t* state_a,
                                                                        const std::byte* data_a,
                                                                        uint32_t* state_b,
                                                                        const std::byte* data_b,
                                                                        size_t nblocks) noexcept {
  leave_avx_state();
  Lane a, b;
  load_state(a, state_a);
  load_state(b, state_b);
  for (; nblocks > 0; --nblocks, data_a += 64, data_b += 64) {
    const __m128i abef_a = a.abef, cdgh_a = a.cdgh, abef_b = b.abef, cdgh_b = b.cdgh;
    all_rounds_pair(a, data_a, b, data_b, Groups{});
    add_state(a, abef_a, cdgh_a);
    add_state(b, abef_b, cdgh_b);
  }
  store_state(a, state_a);
  store_state(b, state_b);
}

}  // namespace tensorizer::digest

#elif defined(__aarch64__)

#include <arm_neon.h>
#include <asm/hwcap.h>
#include <sys/auxv.h>

#include <utility>

#include "digest/sha256_kernels.h"

#if defined(__clang__)
#define TENSORIZER_SHA2 __attribute__((target("sha2")))
#else
#define TENSORIZER_SHA2 __attribute__((target("+crypto")))
#endif
#define TENSORIZER_SHA2_INLINE TENSORIZER_SHA2 __attribute__((always_inline)) inline

namespace tensorizer::digest {
namespace {

// One message: its state, and the last sixteen schedule words.
struct Lane {
  uint32x4_t abcd, efgh;
  uint32x4_t words[4];
};

TENSORIZER_SHA2_INLINE void load_state(Lane& lane, const uint32_t* state) noexcept {
  lane.abcd = vld1q_u32(state);
  lane.efgh = vld1q_u32(state + 4);
}

TENSORIZER_SHA2_INLINE void store_state(const Lane& lane, uint32_t* state) noexcept {
  vst1q_u32(state, lane.abcd);
  vst1q_u32(state + 4, lane.efgh);
}

// Rounds 4 * kGroup ... 4 * kGroup + 3.
template <size_t kGroup>
TENSORIZER_SHA2_INLINE void four_rounds(Lane& lane, const std::byte* block) noexcept {
  uint32x4_t& words = lane.words[kGroup % 4];
  if constexpr (kGroup < 4) {
    const auto* const bytes = reinterpret_cast<const uint8_t*>(block) + 16 * kGroup;
    words = vreinterpretq_u32_u8(vrev32q_u8(vld1q_u8(bytes)));
  } else {
    const uint32x4_t partial = vsha256su0q_u32(words, lane.words[(kGroup + 1) % 4]);
    words = vsha256su1q_u32(partial, lane.words[(kGroup + 2) % 4], lane.words[(kGroup + 3) % 4]);
  }
  const uint32x4_t sums = vaddq_u32(words, vld1q_u32(kRoundConstants + 4 * kGroup));
  const uint32x4_t abcd = lane.abcd;
  lane.abcd = vsha256hq_u32(abcd, lane.efgh, sums);
  lane.efgh = vsha256h2q_u32(lane.efgh, abcd, sums);
}

template <size_t... kGroups>
TENSORIZER_SHA2_INLINE void all_rounds(Lane& lane, const std::byte* block,
                                       std::index_sequence<kGroups...>) noexcept {
  (four_rounds<kGroups>(lane, block), ...);
}

template <size_t... kGroups>
TENSORIZER_SHA2_INLINE void all_rounds_pair(Lane& a, const std::byte* block_a, Lane& b,
                                            const std::byte* block_b,
                                            std::index_sequence<kGroups...>) noexcept {
  ((four_rounds<kGroups>(a, block_a), four_rounds<kGroups>(b, block_b)), ...);
}

using Groups = std::make_index_sequence<16>;

TENSORIZER_SHA2_INLINE void add_state(Lane& lane, uint32x4_t abcd, uint32x4_t efgh) noexcept {
  lane.abcd = vaddq_u32(lane.abcd, abcd);
  lane.efgh = vaddq_u32(lane.efgh, efgh);
}

}  // namespace

bool sha_instructions_supported() noexcept { return (getauxval(AT_HWCAP) & HWCAP_SHA2) != 0; }

TENSORIZER_SHA2 void sha_instructions_absorb(uint32_t* state, const std::byte* data,
                                             size_t nblocks) noexcept {
  Lane lane;
  load_state(lane, state);
  for (; nblocks > 0; --nblocks, data += 64) {
    const uint32x4_t abcd = lane.abcd, efgh = lane.efgh;
    all_rounds(lane, data, Groups{});
    add_state(lane, abcd, efgh);
  }
  store_state(lane, state);
}

TENSORIZER_SHA2 void sha_instructions_absorb_pair(uint32_t* state_a, const std::byte* data_a,
                                                  uint32_t* state_b, const std::byte* data_b,
                                                  size_t nblocks) noexcept {
  Lane a, b;
  load_state(a, state_a);
  load_state(b, state_b);
  for (; nblocks > 0; --nblocks, data_a += 64, data_b += 64) {
    const uint32x4_t abcd_a = a.abcd, efgh_a = a.efgh, abcd_b = b.abcd, efgh_b = b.efgh;
    all_rounds_pair(a, data_a, b, data_b, Groups{});
    add_state(a, abcd_a, efgh_a);
    add_state(b, abcd_b, efgh_b);
  }
  store_state(a, state_a);
  store_state(b, state_b);
}

}  // namespace tensorizer::digest

#else  // other processors: OpenSSL has their kernels

#include "digest/sha256_kernels.h"

namespace tensorizer::digest {

bool sha_instructions_supported() noexcept { return false; }
void sha_instructions_absorb(uint32_t*, const std::byte*, size_t) noexcept {}
void sha_instructions_absorb_pair(uint32_t*, const std::byte*, uint32_t*, const std::byte*,
                                  size_t) noexcept {}

}  // namespace tensorizer::digest

#endif
