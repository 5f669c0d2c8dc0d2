// SHA-256's block function on the SHA instructions of x86 processors. Pure; REQUIRES
// sha_ni_supported().
#pragma once

#include <cstddef>
#include <cstdint>

namespace tensorizer::format {

// Whether this processor, and this build, has them.
bool sha_ni_supported() noexcept;

// Absorbs `nblocks` blocks of 64 bytes into `state`, eight words.
void sha_ni_absorb(uint32_t* state, const std::byte* data, size_t nblocks) noexcept;

// Two messages at once, as many blocks of each: one message alone waits for its own previous round
// most of the time.
void sha_ni_absorb_pair(uint32_t* state_a, const std::byte* data_a, uint32_t* state_b,
                        const std::byte* data_b, size_t nblocks) noexcept;

}  // namespace tensorizer::format
