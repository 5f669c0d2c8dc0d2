// CRC-32 (zlib's) and SHA-256, the two digests of a record. Pure; each object is confined to one
// thread at a time.
//
// CRC-32 runs on ISA-L, which uses PCLMULQDQ/AVX-512; parts combine. SHA-256 uses the SHA-NI
// instructions directly where the processor has them, two independent streams interleaved when
// asked (one stream leaves half of the unit idle), and OpenSSL elsewhere.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

namespace tensorizer::format {

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

  // Same result as a.update(x); b.update(y); faster where both are long. REQUIRES: &a != &b.
  static void update_pair(Sha256& a, std::span<const std::byte> x, Sha256& b,
                          std::span<const std::byte> y) noexcept;

 private:
  void absorb_blocks(const std::byte* data, size_t nblocks) noexcept;
  std::span<const std::byte> top_up(std::span<const std::byte> bytes) noexcept;
  void absorb_rest(std::span<const std::byte> bytes) noexcept;

  alignas(16) std::array<uint32_t, 8> state_;
  std::array<std::byte, 64> buffer_;
  uint64_t total_nbytes_ = 0;
};

// "sha-ni", "openssl" ...: which kernel runs here, for benchmarks and bug reports.
const char* sha256_kernel() noexcept;

}  // namespace tensorizer::format
