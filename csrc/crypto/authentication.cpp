#include "crypto/authentication.h"

#include <sodium.h>

#include <algorithm>
#include <string_view>
#include <utility>

#include "core/wipe.h"
#include "crypto/secret_key.h"

namespace tensorizer::crypto {
namespace {

constexpr char kDerivationContext[] = "TZRAUTH1";
constexpr std::string_view kTagPrefix = "TZRAUTH1";
constexpr std::string_view kSignPrefix = "TZRSIGN1";
constexpr size_t kDrawnNbytes = 16;  // of a nonce; the mark follows

static_assert(sizeof kDerivationContext == crypto_kdf_CONTEXTBYTES + 1);
static_assert(crypto_kdf_KEYBYTES == kKeyNbytes);
static_assert(sizeof(PublicKeyBytes) == crypto_sign_PUBLICKEYBYTES);
static_assert(sizeof(SignatureBytes) == crypto_sign_BYTES);
static_assert(kKeyNbytes == crypto_sign_SEEDBYTES);

auto* raw(std::byte* bytes) noexcept { return reinterpret_cast<unsigned char*>(bytes); }
auto* raw(const std::byte* bytes) noexcept { return reinterpret_cast<const unsigned char*>(bytes); }

std::array<std::byte, 40> prefixed(std::string_view prefix,
                                   std::span<const std::byte, 32> digest) noexcept {
  std::array<std::byte, 40> message;
  std::ranges::copy(std::as_bytes(std::span(prefix)), message.begin());
  std::ranges::copy(digest, message.begin() + 8);
  return message;
}

// The 64 bytes that libsodium signs with: the seed and the public key. They live on the stack of
// one call, which wipes them.
struct ExpandedKey {
  explicit ExpandedKey(const SecretKey& seed) {
    crypto_sign_seed_keypair(raw(public_key.data()), secret.data(), raw(seed.bytes().data()));
  }
  ExpandedKey(const ExpandedKey&) = delete;
  ExpandedKey& operator=(const ExpandedKey&) = delete;
  ~ExpandedKey() { wipe(secret.data(), secret.size()); }

  PublicKeyBytes public_key{};
  std::array<unsigned char, crypto_sign_SECRETKEYBYTES> secret{};
};

}  // namespace

SecretKey derive_subkey(const SecretKey& key, KeyUse use) {
  return SecretKey::filled_by([&](std::span<std::byte, kKeyNbytes> subkey) {
    crypto_kdf_derive_from_key(raw(subkey.data()), subkey.size(), static_cast<uint64_t>(use),
                               kDerivationContext, raw(key.bytes().data()));
  });
}

Tag keyed_hash(std::span<const std::byte> message, const SecretKey& key) {
  Tag tag;
  crypto_generichash(raw(tag.data()), tag.size(), raw(message.data()), message.size(),
                     raw(key.bytes().data()), kKeyNbytes);
  return tag;
}

Tag make_tag(std::span<const std::byte, 32> digest, const SecretKey& key) {
  return keyed_hash(prefixed(kTagPrefix, digest), key);
}

void mark_nonce(std::span<std::byte, kNonceNbytes> nonce, const SecretKey& key) {
  const Tag mark = keyed_hash(nonce.first<kDrawnNbytes>(), key);
  std::copy_n(mark.begin(), kNonceNbytes - kDrawnNbytes, nonce.begin() + kDrawnNbytes);
}

bool is_marked(NonceView nonce, const SecretKey& key) {
  const Tag mark = keyed_hash(nonce.first<kDrawnNbytes>(), key);
  const auto stored = nonce.subspan<kDrawnNbytes>();
  return same_secret(std::span(mark).first(stored.size()), stored);
}

std::array<std::byte, 40> signed_message(std::span<const std::byte, 32> digest) noexcept {
  return prefixed(kSignPrefix, digest);
}

bool is_public_key(const PublicKeyBytes& key) {
  require_sodium();
  return crypto_core_ed25519_is_valid_point(raw(key.data())) == 1;
}

bool verify(const SignatureBytes& signature, std::span<const std::byte> message,
            const PublicKeyBytes& key) {
  require_sodium();
  return is_public_key(key) &&
         crypto_sign_verify_detached(raw(signature.data()), raw(message.data()), message.size(),
                                     raw(key.data())) == 0;
}

SeedSigner::SeedSigner(SecretKey seed) : seed_(std::move(seed)) {
  require_sodium();
  public_key_ = ExpandedKey(seed_).public_key;
}

SignatureBytes SeedSigner::sign(std::span<const std::byte> message) const {
  SignatureBytes signature;
  crypto_sign_detached(raw(signature.data()), nullptr, raw(message.data()), message.size(),
                       ExpandedKey(seed_).secret.data());
  return signature;
}

}  // namespace tensorizer::crypto
