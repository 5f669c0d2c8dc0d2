#include "device/host_arena.h"

#include <sys/mman.h>

#include <string>

#include "core/checked_math.h"
#include "core/error.h"

namespace tensorizer::device {
namespace {

constexpr uint64_t kPageNbytes = 4096;
constexpr uint64_t kHugePageNbytes = uint64_t{2} << 20;

std::byte* map_anonymous(uint64_t nbytes) {
  // NORESERVE: zero-filled tensors may be large on paper and are never written to.
  void* memory = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED)
    throw Error(Errc::out_of_memory,
                "no memory for " + std::to_string(nbytes) + " bytes of tensors");
  return static_cast<std::byte*>(memory);
}

}  // namespace

std::shared_ptr<HostArena> HostArena::create(uint64_t nbytes) {
  if (nbytes > (uint64_t{1} << 62))
    throw Error(Errc::out_of_memory,
                "no memory for " + std::to_string(nbytes) + " bytes of tensors");
  const bool huge = nbytes >= kHugePageNbytes;
  const uint64_t mapped = align_up(nbytes == 0 ? 1 : nbytes, huge ? kHugePageNbytes : kPageNbytes);
  std::byte* data = nullptr;
  if (huge) {
    // The kernel hands out huge pages at aligned addresses only: map one page more, trim both ends.
    std::byte* raw = map_anonymous(mapped + kHugePageNbytes);
    const auto address = reinterpret_cast<uintptr_t>(raw);
    const uint64_t head = align_up(address, kHugePageNbytes) - address;
    if (head > 0) munmap(raw, head);
    data = raw + head;
    if (kHugePageNbytes > head) munmap(data + mapped, kHugePageNbytes - head);
#if defined(MADV_HUGEPAGE)
    madvise(data, mapped, MADV_HUGEPAGE);
#endif
  } else {
    data = map_anonymous(mapped);
  }
  return std::shared_ptr<HostArena>(new HostArena(data, nbytes, mapped));
}

HostArena::~HostArena() { munmap(data_, mapped_); }

}  // namespace tensorizer::device
