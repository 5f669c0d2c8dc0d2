// libsodium as the oracle of our kernels, and small helpers of the crypto tests.
#pragma once

#include <sodium.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "crypto/kernels/box_kernel.h"

namespace tensorizer::crypto::testing {

// Deterministic bytes that differ in every position; `seed` picks one of many streams.
inline std::vector<uint8_t> some_bytes(size_t nbytes, uint64_t seed) {
  unsigned char key[randombytes_SEEDBYTES] = {};
  std::memcpy(key, &seed, sizeof seed);
  std::vector<uint8_t> bytes(nbytes + 1);  // never empty, so data() is never null
  randombytes_buf_deterministic(bytes.data(), nbytes, key);
  bytes.resize(nbytes);
  return bytes;
}

struct Message {
  std::vector<uint8_t> key, nonce, plain, cipher, mac;

  // Sealed by libsodium.
  Message(size_t nbytes, uint64_t seed)
      : key(some_bytes(32, 3 * seed)),
        nonce(some_bytes(24, 3 * seed + 1)),
        plain(some_bytes(nbytes, 3 * seed + 2)),
        cipher(nbytes + 1),
        mac(16) {
    plain.reserve(nbytes + 1);
    crypto_secretbox_detached(cipher.data(), mac.data(), plain.data(), nbytes, nonce.data(),
                              key.data());
    cipher.resize(nbytes);
  }
};

// `nbytes` at a chosen distance from a 64-byte boundary, between canaries that must survive.
class Placed {
 public:
  static constexpr uint8_t kCanary = 0xA5;
  static constexpr size_t kMargin = 128;

  Placed(size_t nbytes, size_t misalignment)
      : memory_(nbytes + 2 * kMargin + 64, kCanary), nbytes_(nbytes) {
    const size_t at = reinterpret_cast<uintptr_t>(memory_.data()) % 64;
    data_ = memory_.data() + (64 - at) % 64 + kMargin + misalignment % 64;
  }
  Placed(const std::vector<uint8_t>& bytes, size_t misalignment)
      : Placed(bytes.size(), misalignment) {
    std::copy(bytes.begin(), bytes.end(), data_);
  }

  uint8_t* data() const { return data_; }
  bool holds(const std::vector<uint8_t>& bytes) const {
    return bytes.size() == nbytes_ && std::equal(bytes.begin(), bytes.end(), data_);
  }
  bool canaries_live() const {
    for (const uint8_t* p = memory_.data(); p < data_; ++p) {
      if (*p != kCanary) return false;
    }
    for (const uint8_t* p = data_ + nbytes_; p < memory_.data() + memory_.size(); ++p) {
      if (*p != kCanary) return false;
    }
    return true;
  }

 private:
  std::vector<uint8_t> memory_;
  uint8_t* data_;
  size_t nbytes_;
};

}  // namespace tensorizer::crypto::testing
