// Memory in whole pages that goes back to the system as soon as it is freed; large blocks from
// malloc may stay with the process for good.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

namespace tensorizer {

// Of memory and of the kernel's cache of files; larger ones are multiples of it.
inline constexpr uint64_t kPageNbytes = 4096;

struct UnmapPages {
  size_t nbytes = 0;
  void operator()(std::byte* memory) const noexcept;
};

using Pages = std::unique_ptr<std::byte[], UnmapPages>;

// At least `nbytes` of zeros, 1 or more. Throws Error(out_of_memory) naming the size.
Pages allocate_pages(size_t nbytes);

// Makes private anonymous memory zero. Whole pages go back to the system, which clears them before
// anybody sees them again.
void clear_pages(std::span<std::byte> memory) noexcept;

}  // namespace tensorizer
