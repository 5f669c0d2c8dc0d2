#include "core/pages.h"

#include <sys/mman.h>

#include <string>

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

}  // namespace tensorizer
