// One implementation of crypto_secretbox (detached). Stateless and immutable; private to
// csrc/crypto.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace tensorizer::crypto {

struct BoxKernel {
  std::string_view name;
  bool (*usable)() noexcept;  // on this processor

  // Buffers are equal or disjoint and never null; mac 16, nonce 24, key 32 bytes.
  void (*seal)(uint8_t* cipher, uint8_t* mac, const uint8_t* plain, size_t nbytes,
               const uint8_t* nonce, const uint8_t* key) noexcept;

  // False when the MAC does not fit. Disjoint `plain` may hold garbage then (the caller wipes it);
  // equal memory is unchanged.
  bool (*open)(uint8_t* plain, const uint8_t* cipher, const uint8_t* mac, size_t nbytes,
               const uint8_t* nonce, const uint8_t* key) noexcept;
};

// Every kernel compiled in, best first; the last one is libsodium, usable everywhere.
std::span<const BoxKernel* const> compiled_kernels() noexcept;

extern const BoxKernel kLibsodiumKernel;

}  // namespace tensorizer::crypto
