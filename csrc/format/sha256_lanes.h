// SHA-256's block function on AVX-512: every message has one 32-bit lane of the registers, so that
// sixteen or eight of them advance together. Pure.
#pragma once

#include <cstddef>

#include "format/sha256_kernels.h"

namespace tensorizer::format {

// Whether this processor, its operating system and this build have them.
bool sha_lanes_supported() noexcept;

// Absorbs `nblocks` blocks of each of the `count` first messages, at most sixteen or eight of them;
// lanes without a message cost as much as others. REQUIRES: sha_lanes_supported(), count > 0.
void sha_absorb_16(const BlockRun* runs, size_t count, size_t nblocks) noexcept;
void sha_absorb_8(const BlockRun* runs, size_t count, size_t nblocks) noexcept;

}  // namespace tensorizer::format
