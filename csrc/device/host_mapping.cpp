#include "device/host_mapping.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <fstream>
#include <string>
#include <utility>

#include "core/checked_math.h"
#include "core/error.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace tensorizer::device {
namespace {

constexpr uint64_t kHugePage = 2ULL << 20;

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

HostMapping::HostMapping(uint64_t nbytes, int numa_node) : nbytes_(align_up(nbytes, kHugePage)) {
  // One huge page more than needed, so that the part kept begins at one; the rest goes back at
  // once.
  const uint64_t reserved = nbytes_ + kHugePage;
  void* raw = ::mmap(nullptr, reserved, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (raw == MAP_FAILED)
    throw Error(Errc::out_of_memory,
                "no host memory for staging buffers: wanted " + std::to_string(nbytes) + " bytes");
  const auto begin = reinterpret_cast<uintptr_t>(raw);
  const uintptr_t aligned = align_up(begin, kHugePage);
  if (aligned > begin) ::munmap(raw, aligned - begin);
  const uint64_t tail = begin + reserved - (aligned + nbytes_);
  if (tail > 0) ::munmap(reinterpret_cast<void*>(aligned + nbytes_), tail);
  data_ = reinterpret_cast<std::byte*>(aligned);
  if (!huge_pages_stall()) ::madvise(data_, nbytes_, MADV_HUGEPAGE);
  ::madvise(data_, nbytes_, MADV_DONTFORK);
  ::madvise(data_, nbytes_, MADV_DONTDUMP);  // plaintext of encrypted files passes through
  prefer_numa_node(data_, nbytes_, numa_node);
}

void HostMapping::fault_in(uint64_t offset, uint64_t nbytes) const noexcept {
  std::byte* const data = data_ + offset;
  if (::madvise(data, nbytes, MADV_POPULATE_WRITE) == 0) return;
  const auto page = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));  // kernels before 5.14
  for (uint64_t at = 0; at < nbytes; at += page)
    *reinterpret_cast<volatile unsigned char*>(data + at) = 0;
}

HostMapping::HostMapping(HostMapping&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), nbytes_(std::exchange(other.nbytes_, 0)) {}

HostMapping& HostMapping::operator=(HostMapping&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(nbytes_, other.nbytes_);
  return *this;
}

HostMapping::~HostMapping() {
  if (data_) ::munmap(data_, nbytes_);
}

}  // namespace tensorizer::device
