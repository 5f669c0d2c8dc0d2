#include "crypto/secret_key.h"

#include <sodium.h>

#include <cstring>
#include <string>
#include <utility>

#include "core/error.h"

namespace tensorizer::crypto {

// sodium_malloc gives the key pages of its own between guard pages, mlock()s them where
// RLIMIT_MEMLOCK lets it, sets MADV_DONTDUMP, and sodium_free wipes before it unmaps. Failing to
// lock is not an error: containers often forbid it.
SecretKey::SecretKey() {
  require_sodium();
  data_ = static_cast<std::byte*>(sodium_malloc(kKeyNbytes));
  if (data_ == nullptr) throw Error(Errc::out_of_memory, "no memory for a secret key");
}

SecretKey::SecretKey(std::span<const std::byte> bytes) : SecretKey() {
  // The delegated constructor has completed, so the destructor frees the pages if this throws.
  if (bytes.size() != kKeyNbytes) {
    throw Error(Errc::invalid_argument, "key: expected " + std::to_string(kKeyNbytes) +
                                            " bytes, got " + std::to_string(bytes.size()));
  }
  std::memcpy(data_, bytes.data(), kKeyNbytes);
  seal();
}

SecretKey SecretKey::random() {
  return filled_by([](std::span<std::byte, kKeyNbytes> key) {
    crypto_secretbox_keygen(reinterpret_cast<unsigned char*>(key.data()));
  });
}

SecretKey::SecretKey(SecretKey&& other) noexcept : data_(std::exchange(other.data_, nullptr)) {}

SecretKey& SecretKey::operator=(SecretKey&& other) noexcept {
  std::swap(data_, other.data_);
  return *this;
}

SecretKey::~SecretKey() { sodium_free(data_); }

std::span<const std::byte, kKeyNbytes> SecretKey::bytes() const noexcept {
  return std::span<const std::byte, kKeyNbytes>(data_, kKeyNbytes);
}

void SecretKey::seal() noexcept { sodium_mprotect_readonly(data_); }

bool same_secret(std::span<const std::byte> a, std::span<const std::byte> b) noexcept {
  return a.size() == b.size() && (a.empty() || sodium_memcmp(a.data(), b.data(), a.size()) == 0);
}

void require_sodium() {
  static const bool kReady = sodium_init() >= 0;  // 1: other code in the process did it before
  if (!kReady) throw Error(Errc::crypto, "libsodium could not be initialised");
}

}  // namespace tensorizer::crypto
