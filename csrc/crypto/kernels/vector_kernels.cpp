#include "crypto/kernels/vector_kernels.h"

#if defined(__x86_64__)
#include "core/cpu_features.h"
#include "crypto/kernels/fused_box.h"

namespace tensorizer::crypto {
namespace {

bool has_avx2() noexcept { return cpu_features().avx2; }
bool has_avx512() noexcept { return has_avx2() && cpu_features().avx512f; }
bool has_ifma() noexcept { return has_avx512() && cpu_features().avx512ifma; }

constexpr BoxParts kIfma{&salsa20_xor_avx512, &poly1305_blocks_ifma};
constexpr BoxParts kAvx512{&salsa20_xor_avx512, &poly1305_blocks_avx2};
constexpr BoxParts kAvx2{&salsa20_xor_avx2, &poly1305_blocks_avx2};

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

}  // namespace

const BoxKernel kAvx512IfmaKernel{"avx512ifma", &has_ifma, &seal<kIfma>, &open<kIfma>};
const BoxKernel kAvx512Kernel{"avx512", &has_avx512, &seal<kAvx512>, &open<kAvx512>};
const BoxKernel kAvx2Kernel{"avx2", &has_avx2, &seal<kAvx2>, &open<kAvx2>};

}  // namespace tensorizer::crypto
#endif
