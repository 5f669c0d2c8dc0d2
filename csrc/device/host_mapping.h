// Host memory that a driver will pin: aligned for huge pages and kept from forked children, since
// pinned pages must not be copied on write, and a child has no use for them. It is address space
// only until it is faulted in, part by part.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "core/pages.h"

namespace tensorizer::device {

// At least `nbytes`, on `numa_node` where the system grants it (-1: anywhere). Throws
// Error(out_of_memory).
Pages map_host_memory(uint64_t nbytes, int numa_node);

// Makes the pages, so that no later access waits for them. Threads may do so for different parts.
void fault_in(std::span<std::byte> memory) noexcept;

}  // namespace tensorizer::device
