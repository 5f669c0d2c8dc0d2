#include "core/pages.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <string>

#include "core/checked_math.h"
#include "core/error.h"

namespace tensorizer {

void UnmapPages::operator()(std::byte* memory) const noexcept { munmap(memory, nbytes); }

Pages allocate_pages(size_t nbytes) {
  void* memory = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED)
    throw Error(Errc::out_of_memory,
                "no memory for a buffer of " + std::to_string(nbytes) + " bytes");
#if defined(MADV_HUGEPAGE)
  madvise(memory, nbytes, MADV_HUGEPAGE);
#endif
  return Pages(static_cast<std::byte*>(memory), UnmapPages{nbytes});
}

void clear_pages(std::span<std::byte> memory) noexcept {
  if (memory.empty()) return;
  const auto page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  const auto address = reinterpret_cast<uintptr_t>(memory.data());
  const uint64_t head = std::min<uint64_t>(align_up(address, page) - address, memory.size());
  const std::span<std::byte> whole =
      memory.subspan(head).first(align_down(memory.size() - head, page));
  const std::span<std::byte> tail = memory.subspan(head + whole.size());
  explicit_bzero(memory.data(), head);
  if (!tail.empty()) explicit_bzero(tail.data(), tail.size());
  // Refused for locked memory, for one.
  if (!whole.empty() && madvise(whole.data(), whole.size(), MADV_DONTNEED) != 0)
    explicit_bzero(whole.data(), whole.size());
}

}  // namespace tensorizer
