// Memory for plaintext of encrypted files on its way: pages of their own, kept out of core dumps,
// given back to the system when it dies, so that nothing of them is found later. Confined to one
// thread.
#pragma once

#include <cstddef>
#include <span>
#include <utility>

namespace tensorizer::crypto {

class SecretBuffer {
 public:
  SecretBuffer() = default;
  // Zeros. Throws Error(out_of_memory).
  explicit SecretBuffer(size_t nbytes);
  SecretBuffer(SecretBuffer&& other) noexcept : bytes_(std::exchange(other.bytes_, {})) {}
  SecretBuffer& operator=(SecretBuffer&& other) noexcept {
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~SecretBuffer();

  std::byte* data() const noexcept { return bytes_.data(); }
  size_t size() const noexcept { return bytes_.size(); }
  std::span<std::byte> bytes() const noexcept { return bytes_; }

 private:
  std::span<std::byte> bytes_;
};

}  // namespace tensorizer::crypto
