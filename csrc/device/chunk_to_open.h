// What the kernels are told about one encrypted chunk: plain data of fixed layout, written by the
// host and read by the device.
//
// Also compiled by nvcc as C++17, so it includes and uses nothing newer.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tensorizer::device {

inline constexpr uint32_t kSegmentNbytes = 1u << 17;  // what one thread block works on
inline constexpr uint32_t kMaxSegments = 32;          // of a chunk; longer ones stay on the host
inline constexpr uint32_t kPowers = 18;               // r^(2^0) to r^(2^17)
inline constexpr uint32_t kPartialWords = 5;          // of one segment's share of the MAC

// One chunk of XSalsa20-Poly1305 whose ciphertext lies at its final address. What stands here opens
// this chunk and no other: the nonce counts in its low bytes, so each chunk has its own subkey.
struct ChunkToOpen {
  uint64_t address;  // REQUIRES: a multiple of 16
  uint64_t nbytes;   // REQUIRES: 1 to kMaxSegments * kSegmentNbytes
  uint32_t segments;
  uint32_t first_segment;  // counted over all chunks of the launch
  uint32_t subkey[8];      // HSalsa20(key, nonce[0..15])
  uint32_t nonce[2];       // nonce[16..23]
  uint32_t pad[4];         // added to the MAC's polynomial at its end
  uint32_t mac[4];
  uint32_t power[kPowers][5];  // r^(2^k) modulo 2^130 - 5, limbs of 26 bits, fully reduced
};
static_assert(sizeof(ChunkToOpen) == 456 && alignof(ChunkToOpen) == 8);

enum Verdict : uint32_t { kVerdictMissing = 0, kVerdictGenuine = 1, kVerdictForged = 2 };

}  // namespace tensorizer::device
