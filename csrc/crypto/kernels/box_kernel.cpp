#include "crypto/kernels/box_kernel.h"

#include <sodium.h>

#include "core/cpu_features.h"
#include "crypto/kernels/fused_box.h"

namespace tensorizer::crypto {
namespace {

// The baseline, and the oracle of every other kernel's tests.
void sodium_seal(uint8_t* cipher, uint8_t* mac, const uint8_t* plain, size_t nbytes,
                 const uint8_t* nonce, const uint8_t* key) noexcept {
  crypto_secretbox_detached(cipher, mac, plain, nbytes, nonce, key);
}
bool sodium_open(uint8_t* plain, const uint8_t* cipher, const uint8_t* mac, size_t nbytes,
                 const uint8_t* nonce, const uint8_t* key) noexcept {
  return crypto_secretbox_open_detached(plain, cipher, mac, nbytes, nonce, key) == 0;
}

#if defined(__x86_64__)
bool has_avx2() noexcept { return cpu_features().avx2; }
bool has_avx512() noexcept { return has_avx2() && cpu_features().avx512f; }
bool has_ifma() noexcept { return has_avx512() && cpu_features().avx512ifma; }

// Salsa20 on 16 blocks, or on 8; Poly1305 with 52-bit multiply-add, or with 32-bit multiplication.
constexpr BoxParts kIfma{&salsa20_xor_avx512, &poly1305_blocks_ifma};
constexpr BoxParts kAvx512{&salsa20_xor_avx512, &poly1305_blocks_avx2};  // Skylake-X, Cascade Lake
constexpr BoxParts kAvx2{&salsa20_xor_avx2, &poly1305_blocks_avx2};
#elif defined(__aarch64__)
bool has_neon() noexcept { return true; }  // all of them

// Salsa20 on 4 blocks. libsodium has no vectors for it on this architecture.
constexpr BoxParts kNeon{&salsa20_xor_neon, &poly1305_blocks_neon};
#endif

#if defined(__x86_64__) || defined(__aarch64__)
template <const BoxParts& kParts>
void seal(uint8_t* cipher, uint8_t* mac, const uint8_t* plain, size_t nbytes, const uint8_t* nonce,
          const uint8_t* key) noexcept {
  fused_seal(kParts, cipher, mac, plain, nbytes, nonce, key);
}

template <const BoxParts& kParts>
bool open(uint8_t* plain, const uint8_t* cipher, const uint8_t* mac, size_t nbytes,
          const uint8_t* nonce, const uint8_t* key) noexcept {
  return fused_open(kParts, plain, cipher, mac, nbytes, nonce, key);
}
#endif

#if defined(__x86_64__)
constexpr BoxKernel kAvx512IfmaKernel{"avx512ifma", &has_ifma, &seal<kIfma>, &open<kIfma>};
constexpr BoxKernel kAvx512Kernel{"avx512", &has_avx512, &seal<kAvx512>, &open<kAvx512>};
constexpr BoxKernel kAvx2Kernel{"avx2", &has_avx2, &seal<kAvx2>, &open<kAvx2>};
#elif defined(__aarch64__)
constexpr BoxKernel kNeonKernel{"neon", &has_neon, &seal<kNeon>, &open<kNeon>};
#endif

}  // namespace

const BoxKernel kLibsodiumKernel{"libsodium", []() noexcept { return true; }, &sodium_seal,
                                 &sodium_open};

std::span<const BoxKernel* const> compiled_kernels() noexcept {
  static constexpr const BoxKernel* kKernels[] = {
#if defined(__x86_64__)
      &kAvx512IfmaKernel, &kAvx512Kernel, &kAvx2Kernel,
#elif defined(__aarch64__)
      &kNeonKernel,
#endif
      &kLibsodiumKernel};
  return kKernels;
}

}  // namespace tensorizer::crypto
