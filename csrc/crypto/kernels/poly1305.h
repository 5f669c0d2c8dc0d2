// Poly1305: scalar arithmetic, and the interface of the vectorised block functions. Pure.
//
// Numbers modulo 2^130 - 5 are three limbs of 44, 44 and 42 bits, which may hold a few bits more
// between rounds. No branch and no address depends on the key, the accumulator or the data; only
// lengths decide what is executed. Source: Bernstein, "The Poly1305-AES message-authentication
// code"; RFC 8439, section 2.5.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace tensorizer::crypto {

inline constexpr size_t kPolyBlockNbytes = 16;
inline constexpr size_t kPolyMacNbytes = 16;

using Limbs = std::array<uint64_t, 3>;

inline constexpr uint64_t kMask44 = (uint64_t{1} << 44) - 1;
inline constexpr uint64_t kMask42 = (uint64_t{1} << 42) - 1;

using Limbs26 = std::array<uint64_t, 5>;  // five limbs of 26 bits

inline constexpr uint64_t kMask26 = (uint64_t{1} << 26) - 1;

struct Poly1305 {
  Limbs h{};                      // the accumulator
  Limbs r{};                      // the clamped multiplier
  std::array<uint64_t, 2> pad{};  // added at the end
  std::array<Limbs, 8> powers{};  // r^1 to r^8, for the vectorised functions
  Limbs power16{};                // r^16
};

// Sets up from the 32-byte one-time key; the powers stay empty.
void poly1305_start(Poly1305& state, const uint8_t* key) noexcept;

// Fills the powers of r.
void poly1305_fill_powers(Poly1305& state) noexcept;

// Absorbs whole 16-byte blocks.
using PolyBlocks = void (*)(Poly1305& state, const uint8_t* data, size_t nblocks) noexcept;
void poly1305_blocks(Poly1305& state, const uint8_t* data, size_t nblocks) noexcept;

// Absorbs a last piece of less than 16 bytes (or none) and gives the MAC.
void poly1305_finish(Poly1305& state, const uint8_t* rest, size_t nbytes, uint8_t* mac) noexcept;

// Sum of lanes or carries back to 44, 44, 42 bits, plus at most one bit in limb 1. Limbs up to
// 2^60.
Limbs poly1305_carried(const Limbs& limbs) noexcept;

// The same number in limbs of 26 bits, and back; both take limbs that hold carries.
Limbs26 poly1305_to_26(const Limbs& limbs) noexcept;
Limbs poly1305_from_26(const Limbs26& limbs) noexcept;

#if defined(__x86_64__)
// Both leave fewer than 8 (AVX2) or 16 (IFMA) blocks to the scalar code. REQUIRES: the powers are
// filled; AVX2; AVX-512F and AVX-512IFMA.
void poly1305_blocks_avx2(Poly1305& state, const uint8_t* data, size_t nblocks) noexcept;
void poly1305_blocks_ifma(Poly1305& state, const uint8_t* data, size_t nblocks) noexcept;
#elif defined(__aarch64__)
// Leaves fewer than 4 blocks to the scalar code. REQUIRES: the powers are filled.
void poly1305_blocks_neon(Poly1305& state, const uint8_t* data, size_t nblocks) noexcept;
#endif

}  // namespace tensorizer::crypto
