#include "device/host_arena.h"

#include <sys/mman.h>

#include <string>

#include "core/checked_math.h"
#include "core/error.h"
#include "device/kept_memory.h"

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

std::byte* map_huge(uint64_t nbytes) {
  // The kernel hands out huge pages at aligned addresses only: map one page more, trim both ends.
  std::byte* raw = map_anonymous(nbytes + kHugePageNbytes);
  const auto address = reinterpret_cast<uintptr_t>(raw);
  const uint64_t head = align_up(address, kHugePageNbytes) - address;
  if (head > 0) munmap(raw, head);
  std::byte* const data = raw + head;
  if (kHugePageNbytes > head) munmap(data + nbytes, kHugePageNbytes - head);
#if defined(MADV_HUGEPAGE)
  madvise(data, nbytes, MADV_HUGEPAGE);
#endif
  return data;
}

uint64_t mapped_nbytes(uint64_t nbytes) {
  if (nbytes > (uint64_t{1} << 62))
    throw Error(Errc::out_of_memory,
                "no memory for " + std::to_string(nbytes) + " bytes of tensors");
  return align_up(nbytes == 0 ? 1 : nbytes,
                  nbytes >= kHugePageNbytes ? kHugePageNbytes : kPageNbytes);
}

}  // namespace

std::shared_ptr<HostArena> HostArena::create(uint64_t nbytes) {
  const uint64_t mapped = mapped_nbytes(nbytes);
  std::byte* const data = nbytes >= kHugePageNbytes ? map_huge(mapped) : map_anonymous(mapped);
  return std::shared_ptr<HostArena>(new HostArena(data, nbytes, mapped, false));
}

std::shared_ptr<HostArena> HostArena::recycle(uint64_t nbytes) {
  const uint64_t mapped = mapped_nbytes(nbytes);
  if (nbytes < kHugePageNbytes) return create(nbytes);
  std::byte* data = KeptMemory::instance().take(mapped).data;
  if (data == nullptr) data = map_huge(mapped);
  return std::shared_ptr<HostArena>(new HostArena(data, nbytes, mapped, true));
}

HostArena::~HostArena() {
  if (!recycled_ || !KeptMemory::instance().give({data_, mapped_})) munmap(data_, mapped_);
}

}  // namespace tensorizer::device
