// SHA-256's block function: OpenSSL's, for every processor, and one on the SHA instructions of x86
// (sha_ni_*, REQUIRES: sha_ni_supported()). Pure.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tensorizer::format {

inline constexpr size_t kSha256BlockNbytes = 64;

// Whether this processor, and this build, has them.
bool sha_ni_supported() noexcept;

// Absorbs `nblocks` blocks of 64 bytes into `state`, eight words.
void openssl_absorb(uint32_t* state, const std::byte* data, size_t nblocks) noexcept;

// The same on SHA instructions: `nblocks` blocks of 64 bytes into `state`, eight words.
void sha_ni_absorb(uint32_t* state, const std::byte* data, size_t nblocks) noexcept;

// Two messages at once, as many blocks of each: one message alone waits for its own previous round
// most of the time.
void sha_ni_absorb_pair(uint32_t* state_a, const std::byte* data_a, uint32_t* state_b,
                        const std::byte* data_b, size_t nblocks) noexcept;

}  // namespace tensorizer::format
