#include "device/slot_ring.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <string>
#include <thread>
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

void fault_in(std::byte* data, uint64_t nbytes) {
  if (::madvise(data, nbytes, MADV_POPULATE_WRITE) == 0) return;
  const auto page = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));  // kernels before 5.14
  for (uint64_t at = 0; at < nbytes; at += page)
    *reinterpret_cast<volatile unsigned char*>(data + at) = 0;
}

void fault_in_parallel(std::byte* data, uint64_t nbytes, unsigned threads) {
  const uint64_t share = align_up(ceil_div(nbytes, std::max(threads, 1U)), kHugePage);
  std::vector<std::jthread> helpers;
  for (uint64_t at = share; at < nbytes; at += share)
    helpers.emplace_back(fault_in, data + at, std::min(share, nbytes - at));
  fault_in(data, std::min(share, nbytes));
}

}  // namespace

HostMapping::HostMapping(uint64_t nbytes, int numa_node, unsigned threads)
    : nbytes_(align_up(nbytes, kHugePage)) {
  // One huge page more than needed, so that the part kept begins at one; the rest goes back at
  // once.
  const uint64_t reserved = nbytes_ + kHugePage;
  void* raw = ::mmap(nullptr, reserved, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (raw == MAP_FAILED)
    throw Error(Errc::out_of_memory,
                "no host memory for staging slots: wanted " + std::to_string(nbytes) + " bytes");
  const auto begin = reinterpret_cast<uintptr_t>(raw);
  const uintptr_t aligned = align_up(begin, kHugePage);
  if (aligned > begin) ::munmap(raw, aligned - begin);
  const uint64_t tail = begin + reserved - (aligned + nbytes_);
  if (tail > 0) ::munmap(reinterpret_cast<void*>(aligned + nbytes_), tail);
  data_ = reinterpret_cast<std::byte*>(aligned);
  ::madvise(data_, nbytes_, MADV_HUGEPAGE);
  ::madvise(data_, nbytes_, MADV_DONTFORK);
  prefer_numa_node(data_, nbytes_, numa_node);
  fault_in_parallel(data_, nbytes_, threads);
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

SlotRing::SlotRing(std::byte* data, unsigned slots, uint64_t slot_nbytes)
    : data_(data), slots_(slots), slot_nbytes_(slot_nbytes) {
  for (unsigned slot = slots; slot-- > 0;) free_.push_back(slot);
}

std::optional<unsigned> SlotRing::take(const std::stop_token& stop,
                                       const std::atomic<bool>& broken) {
  MutexLock lock(mutex_);
  const bool awake = changed_.wait(mutex_, stop, [&]() REQUIRES_LOCK(mutex_) {
    return broken.load() || closed_ || !free_.empty();
  });
  if (!awake || broken.load() || closed_) return std::nullopt;
  const unsigned slot = free_.back();
  free_.pop_back();
  return slot;
}

void SlotRing::give_back(unsigned slot) noexcept {
  {
    MutexLock lock(mutex_);
    free_.push_back(slot);  // never allocates: the vector once held every slot
  }
  changed_.notify_one();
}

void SlotRing::wake_all() noexcept {
  { MutexLock lock(mutex_); }  // a waiter between its test and its sleep must not miss this
  changed_.notify_all();
}

void SlotRing::close() noexcept {
  {
    MutexLock lock(mutex_);
    closed_ = true;
  }
  changed_.notify_all();
}

bool SlotRing::closed() const {
  MutexLock lock(mutex_);
  return closed_;
}

unsigned SlotRing::free_slots() const {
  MutexLock lock(mutex_);
  return static_cast<unsigned>(free_.size());
}

}  // namespace tensorizer::device
