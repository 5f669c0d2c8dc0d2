// Authentication of files: tags under keys derived from the file's key, nonces that carry a mark of
// it, and Ed25519 signatures. Stateless functions, safe from any thread.
// Source: docs/format.md, "Authentication"; RFC 8032; libsodium's crypto_kdf.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "crypto/chunked_box.h"
#include "crypto/secret_key.h"

namespace tensorizer::crypto {

using Tag = std::array<std::byte, 32>;
using PublicKeyBytes = std::array<std::byte, 32>;
using SignatureBytes = std::array<std::byte, 64>;

// What a key derived from a file's key is for.
enum class KeyUse : uint64_t { tag = 1, mark = 2, marker = 3 };
SecretKey derive_subkey(const SecretKey& key, KeyUse use);

// BLAKE2b of 32 bytes under a key.
Tag keyed_hash(std::span<const std::byte> message, const SecretKey& key);
// The tag of an index digest. `key`: derived for KeyUse::tag.
Tag make_tag(std::span<const std::byte, 32> digest, const SecretKey& key);

// Bytes 16 to 23 of a first nonce say to a reader with the key that its file is authenticated.
// `key`: derived for KeyUse::mark.
void mark_nonce(std::span<std::byte, kNonceNbytes> nonce, const SecretKey& key);
bool is_marked(NonceView nonce, const SecretKey& key);

// What a signature of an index digest is made of.
std::array<std::byte, 40> signed_message(std::span<const std::byte, 32> digest) noexcept;

// Whether the bytes are the one encoding of a point of the group that keys are of.
bool is_public_key(const PublicKeyBytes& key);
// Always false for keys that are none.
bool verify(const SignatureBytes& signature, std::span<const std::byte> message,
            const PublicKeyBytes& key);

// Makes signatures: with a key in this process, or by asking a program that has it.
class Signer {
 public:
  virtual ~Signer() = default;
  virtual PublicKeyBytes public_key() const = 0;
  virtual SignatureBytes sign(std::span<const std::byte> message) const = 0;
};

// Ed25519 with the key in guarded memory. Immutable.
class SeedSigner final : public Signer {
 public:
  explicit SeedSigner(SecretKey seed);
  PublicKeyBytes public_key() const override { return public_key_; }
  SignatureBytes sign(std::span<const std::byte> message) const override;

 private:
  SecretKey seed_;
  PublicKeyBytes public_key_{};
};

}  // namespace tensorizer::crypto
