// Private anonymous memory in whole pages. The system makes them when they are first written and
// takes them back as soon as they are freed; large blocks from malloc may stay with the process for
// good.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

namespace tensorizer {

// Of memory and of the system's cache of files; larger ones are multiples of it.
inline constexpr uint64_t kPageNbytes = 4096;
inline constexpr uint64_t kHugePageNbytes = uint64_t{2} << 20;

struct UnmapPages {
  size_t nbytes = 0;
  void operator()(std::byte* memory) const noexcept;
};

using Pages = std::unique_ptr<std::byte[], UnmapPages>;

inline std::span<std::byte> bytes_of(const Pages& pages) noexcept {
  return {pages.get(), pages ? pages.get_deleter().nbytes : 0};
}

enum class PageUse {
  buffer,   // in huge pages where the system has them
  tensors,  // the same; may be large on paper and never be written, so the system sets nothing
            // aside
  secret,   // kept out of core dumps
};

// At least `nbytes` of zeros, which may be 0: whole pages, and from 2 MiB on whole huge pages.
// Throws Error(out_of_memory) naming the size.
Pages allocate_pages(size_t nbytes, PageUse use = PageUse::buffer);

// Asks for huge pages; no answer is needed.
void prefer_huge_pages(std::span<std::byte> memory) noexcept;

// Makes private anonymous memory zero. Whole pages go back to the system, which clears them before
// anybody sees them again.
void clear_pages(std::span<std::byte> memory) noexcept;

}  // namespace tensorizer
