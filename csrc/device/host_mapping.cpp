#include "device/host_mapping.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <fstream>
#include <string>

#include "core/checked_math.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace tensorizer::device {
namespace {

// A wish, not a demand: containers often forbid the call, and hosts with one node have nothing to
// choose.
void prefer_numa_node([[maybe_unused]] void* data, [[maybe_unused]] uint64_t nbytes, int node) {
#ifdef SYS_mbind
  constexpr int kPreferred = 1;
  constexpr int kMaskBits = 1024;
  constexpr int kWordBits = 8 * static_cast<int>(sizeof(unsigned long));
  if (node < 0 || node >= kMaskBits) return;
  unsigned long mask[kMaskBits / kWordBits] = {};
  mask[node / kWordBits] = 1UL << (node % kWordBits);
  static_cast<void>(::syscall(SYS_mbind, data, nbytes, kPreferred, mask, kMaskBits + 1, 0));
#endif
}

// Whether the system makes room for huge pages while a thread waits for memory, which can take
// seconds, as of its setting for those who ask for huge pages.
bool huge_pages_stall() {
  std::ifstream file("/sys/kernel/mm/transparent_hugepage/defrag");
  std::string word;
  while (file >> word)
    if (word == "[always]" || word == "[madvise]" || word == "[defer+madvise]") return true;
  return false;
}

}  // namespace

Pages map_host_memory(uint64_t nbytes, int numa_node) {
  // Plaintext of encrypted files passes through.
  Pages pages = allocate_pages(align_up(nbytes, kHugePageNbytes), PageUse::secret);
  const std::span<std::byte> memory = bytes_of(pages);
  if (!huge_pages_stall()) prefer_huge_pages(memory);
  ::madvise(memory.data(), memory.size(), MADV_DONTFORK);
  prefer_numa_node(memory.data(), memory.size(), numa_node);
  return pages;
}

void fault_in(std::span<std::byte> memory) noexcept {
  if (::madvise(memory.data(), memory.size(), MADV_POPULATE_WRITE) == 0) return;
  const auto page = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));  // before Linux 5.14
  for (uint64_t at = 0; at < memory.size(); at += page)
    *reinterpret_cast<volatile unsigned char*>(&memory[at]) = 0;
}

}  // namespace tensorizer::device
