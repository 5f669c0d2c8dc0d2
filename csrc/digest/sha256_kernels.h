// The ways to absorb blocks of many SHA-256 messages, and which of them suits how many messages on
// this processor.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace tensorizer::digest {

inline constexpr size_t kSha256BlockNbytes = 64;

// Blocks of one message.
struct BlockRun {
  uint32_t* state;  // eight words
  const std::byte* data;
  size_t nblocks;
};

struct Sha256Kernel {
  struct Width {
    size_t from;   // it pays from so many messages on
    size_t lanes;  // so many at a time, at most kMostLanes
    // `nblocks` blocks of each of `count` messages; BlockRun::nblocks does not matter.
    void (*absorb)(const BlockRun* runs, size_t count, size_t nblocks) noexcept;
  };

  const char* name;
  bool (*usable)() noexcept;      // on this processor, under this operating system
  std::span<const Width> widths;  // widest first; the last is for one message

  const Width& width_for(size_t messages) const noexcept;
};

inline constexpr size_t kMostLanes = 16;

// All that this build has, the preferred first; the last is usable everywhere.
std::span<const Sha256Kernel> compiled_sha256_kernels() noexcept;
// The first that is usable here. Where it has both SHA instructions and lanes, the first call takes
// a third of a millisecond: which of them is faster differs from processor to processor, so it
// measures.
const Sha256Kernel& sha256_kernel_here() noexcept;

// The time for a byte by each way, all lanes full, in the same measure.
struct Sha256Times {
  double pair = 0;
  double eight = 0;
  double sixteen = 0;
};
// The widths of a kernel with SHA instructions and lanes where these are the times. Pure.
std::vector<Sha256Kernel::Width> widths_for(const Sha256Times& times);

// Absorbs all blocks of all messages. Sorts `runs`.
void absorb_all(const Sha256Kernel& kernel, std::span<BlockRun> runs) noexcept;

// The block functions, which the kernels are made of: OpenSSL's, for every processor; one on the
// SHA instructions of x86-64 or aarch64 (sha_instructions_*, REQUIRES:
// sha_instructions_supported()); one on AVX-512. Whether this processor, and this build, has SHA
// instructions:
bool sha_instructions_supported() noexcept;

// Absorbs `nblocks` blocks of 64 bytes into `state`, eight words.
void openssl_absorb(uint32_t* state, const std::byte* data, size_t nblocks) noexcept;

// The same on SHA instructions: `nblocks` blocks of 64 bytes into `state`, eight words.
void sha_instructions_absorb(uint32_t* state, const std::byte* data, size_t nblocks) noexcept;

// Two messages at once, as many blocks of each: one message alone waits for its own previous round
// most of the time.
void sha_instructions_absorb_pair(uint32_t* state_a, const std::byte* data_a, uint32_t* state_b,
                                  const std::byte* data_b, size_t nblocks) noexcept;

// Whether this processor, its operating system and this build have AVX-512, where every message has
// one 32-bit lane of the registers, so that sixteen or eight of them advance together.
bool sha_lanes_supported() noexcept;

// Absorbs `nblocks` blocks of each of the `count` first messages, at most sixteen or eight of them;
// lanes without a message cost as much as others. REQUIRES: sha_lanes_supported(), count > 0.
void sha_absorb_16(const BlockRun* runs, size_t count, size_t nblocks) noexcept;
void sha_absorb_8(const BlockRun* runs, size_t count, size_t nblocks) noexcept;

// Private to the block functions.
alignas(64) inline constexpr uint32_t kRoundConstants[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

}  // namespace tensorizer::digest
