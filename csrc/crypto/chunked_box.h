// XSalsa20-Poly1305 (crypto_secretbox, detached), message by message, out of place or in place.
//
// A payload is cut into chunks; chunk i is one message under nonce + i. Stateless functions, safe
// from any thread. The kernel is chosen once per process by CPU feature; tests and benchmarks
// choose another one by select_kernel. All kernels give
// the same bytes. Source: docs/format.md, "Encryption"; Bernstein, "Extending the Salsa20 nonce".
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "core/format_sizes.h"
#include "crypto/secret_key.h"

namespace tensorizer::crypto {

using NonceView = std::span<const std::byte, kNonceNbytes>;

// Encrypts `plain` to `cipher` and writes its MAC.
// REQUIRES: same size; equal or disjoint memory; nobody writes to `plain` during the call; this
// (key, nonce) pair was never used for another message.
void seal(std::span<std::byte> cipher, std::span<std::byte, kMacNbytes> mac,
          std::span<const std::byte> plain, NonceView nonce, const SecretKey& key) noexcept;

// Decrypts `cipher` to `plain`. False when the MAC does not fit: then `plain` is all zeros where it
// is disjoint from `cipher`, and unchanged where it is the same memory. While the call runs, a
// disjoint `plain` may hold plaintext whose MAC is still being computed, so nobody else may look at
// it before the call has returned true. REQUIRES: same size; equal or disjoint memory; nobody
// writes to `cipher` during the call.
[[nodiscard]] bool open(std::span<std::byte> plain, std::span<const std::byte> cipher,
                        std::span<const std::byte, kMacNbytes> mac, NonceView nonce,
                        const SecretKey& key) noexcept;

// nonce + n, little-endian modulo 2^192.
std::array<std::byte, kNonceNbytes> nonce_plus(NonceView nonce, uint64_t n) noexcept;

// Cryptographically random bytes.
void random_bytes(std::span<std::byte> out) noexcept;

// Kernels usable on this processor, best first ("libsodium" is always the last); the active one;
// choosing one (false: unknown or not usable here). Choosing takes effect for calls that start
// later.
std::vector<std::string_view> available_kernels();
std::string_view active_kernel() noexcept;
bool select_kernel(std::string_view name) noexcept;

}  // namespace tensorizer::crypto
