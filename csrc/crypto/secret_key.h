// 32 secret bytes: wiped when they die, locked in memory and kept out of core dumps where the system allows.
// Not copyable; immutable once filled, so safe to share between threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

namespace tensorizer::crypto {

inline constexpr size_t kKeyNbytes = 32;

class SecretKey {
 public:
  // Copies 32 bytes. Throws Error(invalid_argument) for another length.
  explicit SecretKey(std::span<const std::byte> bytes);
  static SecretKey random();
  SecretKey(SecretKey&&) noexcept;
  SecretKey& operator=(SecretKey&&) noexcept;
  ~SecretKey();

  std::span<const std::byte, kKeyNbytes> bytes() const noexcept;

 private:
  struct Guarded;  // a page of its own from sodium_malloc
  SecretKey();
  std::byte* data_ = nullptr;
};

// Constant-time comparison.
bool same_secret(std::span<const std::byte> a, std::span<const std::byte> b) noexcept;

}  // namespace tensorizer::crypto
