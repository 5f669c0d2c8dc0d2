// secretbox from a keystream and a MAC that are vectorised apart: both go over the message in
// stretches small enough to stay in the first-level cache, so that memory is read once. Stateless.
#pragma once

#include <cstddef>
#include <cstdint>

#include "crypto/kernels/poly1305.h"
#include "crypto/kernels/salsa20.h"

namespace tensorizer::crypto {

struct BoxParts {
  SalsaXor salsa_xor;
  PolyBlocks poly_blocks;
};

// As BoxKernel::seal and BoxKernel::open.
void fused_seal(const BoxParts& parts, uint8_t* cipher, uint8_t* mac, const uint8_t* plain,
                size_t nbytes, const uint8_t* nonce, const uint8_t* key) noexcept;
bool fused_open(const BoxParts& parts, uint8_t* plain, const uint8_t* cipher, const uint8_t* mac,
                size_t nbytes, const uint8_t* nonce, const uint8_t* key) noexcept;

}  // namespace tensorizer::crypto
