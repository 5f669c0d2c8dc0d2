// The baseline, and the oracle of every other kernel's tests.
#include <sodium.h>

#include "crypto/kernels/box_kernel.h"

namespace tensorizer::crypto {
namespace {

void seal(uint8_t* cipher, uint8_t* mac, const uint8_t* plain, size_t nbytes, const uint8_t* nonce,
          const uint8_t* key) noexcept {
  crypto_secretbox_detached(cipher, mac, plain, nbytes, nonce, key);
}

bool open(uint8_t* plain, const uint8_t* cipher, const uint8_t* mac, size_t nbytes,
          const uint8_t* nonce, const uint8_t* key) noexcept {
  return crypto_secretbox_open_detached(plain, cipher, mac, nbytes, nonce, key) == 0;
}

}  // namespace

const BoxKernel kLibsodiumKernel{"libsodium", []() noexcept { return true; }, &seal, &open};

}  // namespace tensorizer::crypto
