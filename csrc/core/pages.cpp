#include "core/pages.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <string>

#include "core/checked_math.h"
#include "core/error.h"
#include "core/wipe.h"

namespace tensorizer {

void UnmapPages::operator()(std::byte* memory) const noexcept { munmap(memory, nbytes); }

Pages allocate_pages(size_t nbytes, PageUse use) {
  const bool tensors = use == PageUse::tensors;
  const bool huge = nbytes >= kHugePageNbytes;
  const size_t page = huge ? kHugePageNbytes : kPageNbytes;
  // Mapped in addition, and given back at both ends, so that the rest begins where a huge page
  // does.
  const size_t spare = huge ? page : 0;
  const bool fits = nbytes <= SIZE_MAX - page - spare;
  const size_t kept = fits ? align_up(std::max<size_t>(nbytes, 1), page) : 0;
  void* const mapped =
      fits ? mmap(nullptr, kept + spare, PROT_READ | PROT_WRITE,
                  MAP_PRIVATE | MAP_ANONYMOUS | (tensors ? MAP_NORESERVE : 0), -1, 0)
           : MAP_FAILED;
  if (mapped == MAP_FAILED)
    throw Error(Errc::out_of_memory, "no memory for " + std::to_string(nbytes) + " bytes of " +
                                         (tensors ? "tensors" : "a buffer"));
  auto* const raw = static_cast<std::byte*>(mapped);
  const size_t before =
      huge ? align_up(reinterpret_cast<uintptr_t>(raw), page) - reinterpret_cast<uintptr_t>(raw)
           : 0;
  if (before > 0) munmap(raw, before);
  if (spare > before) munmap(raw + before + kept, spare - before);
  Pages pages(raw + before, UnmapPages{kept});
  if (use == PageUse::secret) {
    madvise(pages.get(), kept, MADV_DONTDUMP);
  } else if (huge) {
    prefer_huge_pages(bytes_of(pages));
  }
  return pages;
}

void prefer_huge_pages(std::span<std::byte> memory) noexcept {
  madvise(memory.data(), memory.size(), MADV_HUGEPAGE);
}

void clear_pages(std::span<std::byte> memory) noexcept {
  if (memory.empty()) return;
  const auto page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  const auto address = reinterpret_cast<uintptr_t>(memory.data());
  const uint64_t first = std::min<uint64_t>(align_up(address, page) - address, memory.size());
  const std::span<std::byte> whole =
      memory.subspan(first).first(align_down(memory.size() - first, page));
  const std::span<std::byte> last = memory.subspan(first + whole.size());
  wipe(memory.data(), first);
  wipe(last.data(), last.size());
  // Refused for locked memory, for one.
  if (!whole.empty() && madvise(whole.data(), whole.size(), MADV_DONTNEED) != 0)
    wipe(whole.data(), whole.size());
}

}  // namespace tensorizer
