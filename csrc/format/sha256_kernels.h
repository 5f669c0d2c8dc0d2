// The ways to absorb blocks of many SHA-256 messages, and which of them suits how many messages on
// this processor. Pure.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace tensorizer::format {

// Blocks of 64 bytes of one message.
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
// The first that is usable here.
const Sha256Kernel& sha256_kernel_here() noexcept;

// Absorbs all blocks of all messages. Sorts `runs`.
void absorb_all(const Sha256Kernel& kernel, std::span<BlockRun> runs) noexcept;

}  // namespace tensorizer::format
