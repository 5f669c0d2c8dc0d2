// Memory for what is secret: keys, and plaintext of encrypted files on its way.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace tensorizer::crypto {

inline constexpr size_t kKeyNbytes = 32;

// 32 secret bytes: wiped when they die, locked in memory and kept out of core dumps where the
// system allows. Not copyable; immutable once filled, so safe to share between threads.
class SecretKey {
 public:
  // Copies 32 bytes; the caller still owns, and should wipe, the original.
  // Throws Error: invalid_argument for another length, out_of_memory.
  explicit SecretKey(std::span<const std::byte> bytes);
  static SecretKey random();

  // A moved-from key may only be destroyed or assigned to.
  SecretKey(SecretKey&& other) noexcept;
  SecretKey& operator=(SecretKey&& other) noexcept;
  SecretKey(const SecretKey&) = delete;
  SecretKey& operator=(const SecretKey&) = delete;
  ~SecretKey();

  std::span<const std::byte, kKeyNbytes> bytes() const noexcept;

  // A key of bytes that `fill(std::span<std::byte, 32>)` writes in place, so that they exist
  // nowhere else.
  template <class Fill>
  static SecretKey filled_by(Fill&& fill) {
    SecretKey key;
    fill(std::span<std::byte, kKeyNbytes>(key.data_, kKeyNbytes));
    key.seal();
    return key;
  }

 private:
  SecretKey();           // allocates guarded pages, still writable
  void seal() noexcept;  // makes the pages read-only
  std::byte* data_ = nullptr;
};

// Constant-time comparison of contents; lengths are not secret.
bool same_secret(std::span<const std::byte> a, std::span<const std::byte> b) noexcept;

// Initialises libsodium, the first time. Throws Error(crypto) where that fails (no source of
// randomness).
void require_sodium();

}  // namespace tensorizer::crypto
