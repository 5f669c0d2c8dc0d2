#include "device/host_arena.h"

#include <utility>

#include "device/kept_memory.h"

namespace tensorizer::device {

std::shared_ptr<HostArena> HostArena::create(uint64_t nbytes) {
  return std::make_shared<HostArena>(allocate_pages(nbytes, PageUse::tensors), nbytes, false);
}

std::shared_ptr<HostArena> HostArena::recycle(uint64_t nbytes) {
  if (nbytes < kHugePageNbytes) return create(nbytes);
  Pages pages = KeptMemory::instance().take(nbytes);
  if (!pages) pages = allocate_pages(nbytes, PageUse::tensors);
  return std::make_shared<HostArena>(std::move(pages), nbytes, true);
}

HostArena::~HostArena() {
  if (recycled_) KeptMemory::instance().give(std::move(pages_));
}

}  // namespace tensorizer::device
