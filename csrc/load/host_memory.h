// Which tensors of a load share memory, and whose memory may be used again.
#pragma once

#include <span>
#include <vector>

#include "load/load_session.h"
#include "load/open_index.h"

namespace tensorizer::load {

// Gives every target that has none (in_place) and takes some a destination in host memory, in file
// order. A tensor of at least 8 MiB has pages of its own; smaller ones share an arena of at most 16
// MiB, so a tensor that stays alive keeps at most 16 MiB beyond its own bytes.
//
// Tensors of plain files get memory that earlier ones have left, and leave theirs to later ones;
// tensors without data are zeroed. What was decrypted goes back to the system with its tensor,
// which wipes it, and does not lie in memory that others get.
//
// `sized`: the size of the source is known, and the index within it. Throws Error: out_of_memory;
// malformed for a tensor that only claims its size.
void allocate_on_host(const OpenedIndex& opened, bool sized, std::span<LoadTarget> targets);

// Memory for parts of tensors, one of each size, in the same way; null for 0 bytes. `secret`: what
// will be there was decrypted. Throws Error(out_of_memory).
std::vector<device::Destination> allocate_parts(std::span<const uint64_t> sizes, bool secret);

}  // namespace tensorizer::load
