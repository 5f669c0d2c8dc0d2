// CRC-32 (zlib's) and SHA-256, the two digests of a record. Pure; each object is confined to one
// thread at a time.
//
// CRC-32 runs on ISA-L, which uses PCLMULQDQ/AVX-512; parts combine. SHA-256 of
// one stream waits for itself most of the time: several are updated in one call where there are
// several, in the lanes of AVX-512 registers or two at a time on the SHA-NI instructions; OpenSSL
// has the block function of other processors.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

namespace tensorizer::digest {

uint32_t crc32(uint32_t seed,
               std::span<const std::byte> bytes) noexcept;  // seed 0 to start; zlib convention

// CRC of A||B from crc(A), crc(B) and |B|.
uint32_t crc32_combine(uint32_t crc_a, uint32_t crc_b, uint64_t nbytes_b) noexcept;

using Sha256Digest = std::array<std::byte, 32>;

class Sha256 {
 public:
  Sha256() noexcept;
  void update(std::span<const std::byte> bytes) noexcept;
  // The digest of everything so far; the object must not be used afterwards.
  Sha256Digest finish() noexcept;

  struct Update {
    Sha256* stream;
    std::span<const std::byte> bytes;
  };
  // stream->update(bytes) for each; faster where several are long. Changes `bytes`. REQUIRES: no
  // stream comes twice.
  static void update_all(std::span<Update> updates);
  // Of `ready` streams with as many bytes each, how many to update in one call.
  static size_t at_once(size_t ready) noexcept;
  // The most that one call hashes side by side.
  static size_t lanes() noexcept;

 private:
  void absorb_blocks(const std::byte* data, size_t nblocks) noexcept;
  std::span<const std::byte> top_up(std::span<const std::byte> bytes) noexcept;
  void keep_tail(std::span<const std::byte> bytes) noexcept;

  alignas(16) std::array<uint32_t, 8> state_;
  std::array<std::byte, 64> buffer_;
  uint64_t total_nbytes_ = 0;
};

// Which digests of a record are stored, or wanted.
struct HashChoice {
  bool crc32 = true;
  bool sha256 = true;
};

// Both digests of a record header; they continue with the payload.
struct HeaderDigest {
  uint32_t crc32 = 0;
  Sha256 sha256;
};

}  // namespace tensorizer::digest
