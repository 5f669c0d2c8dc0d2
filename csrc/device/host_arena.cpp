#include "device/host_arena.h"

#include <pthread.h>
#include <sys/mman.h>

#include <new>
#include <utility>

#include "core/checked_math.h"

namespace tensorizer::device {
namespace {

KeptMemory* the_kept = nullptr;

}  // namespace

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

KeptMemory& KeptMemory::instance() {
  static auto* const kept = new KeptMemory;
  return *kept;
}

// The lock is held across a fork, so that the child finds everything in order; what is kept would
// be copied page by page: it goes.
KeptMemory::KeptMemory() {
  the_kept = this;
  pthread_atfork([] { the_kept->mutex_.lock(); }, [] { the_kept->mutex_.unlock(); },
                 [] {
                   the_kept->drop(the_kept->max_nbytes_);
                   the_kept->mutex_.unlock();
                 });
}

void KeptMemory::configure(uint64_t max_nbytes, std::chrono::milliseconds idle) {
  const std::lock_guard lock(mutex_);
  max_nbytes_ = idle.count() > 0 ? max_nbytes : 0;
  idle_ = idle;
  drop();
}

uint64_t KeptMemory::nbytes() const noexcept {
  const std::lock_guard lock(mutex_);
  return nbytes_;
}

// Of the smallest that is large enough; what is left of it stays here.
Pages KeptMemory::take(uint64_t nbytes) noexcept {
  const std::lock_guard lock(mutex_);
  if (nbytes > nbytes_) return {};
  nbytes = align_up(nbytes, kHugePageNbytes);
  auto best = kept_.end();
  for (auto it = kept_.begin(); it != kept_.end(); ++it) {
    const size_t size = bytes_of(it->pages).size();
    if (size >= nbytes && (best == kept_.end() || size < bytes_of(best->pages).size())) best = it;
  }
  if (best == kept_.end()) return {};
  const std::span<std::byte> whole = bytes_of(best->pages);
  Pages taken(best->pages.release(), UnmapPages{nbytes});
  if (whole.size() > nbytes)
    best->pages = Pages(whole.data() + nbytes, UnmapPages{whole.size() - nbytes});
  else
    kept_.erase(best);
  nbytes_ -= nbytes;
  return taken;
}

void KeptMemory::give(Pages pages) noexcept {
  const std::lock_guard lock(mutex_);
  const std::span<std::byte> memory = bytes_of(pages);
  if (memory.size() > max_nbytes_) return;
  drop(memory.size());
  if (madvise(memory.data(), memory.size(), MADV_FREE) != 0) return;
  try {
    kept_.push_back({std::move(pages), Clock::now() + idle_});
    nbytes_ += memory.size();
  } catch (const std::bad_alloc&) {  // they go
  }
}

// REQUIRES: the lock is held.
void KeptMemory::drop(uint64_t room) noexcept {
  while (!kept_.empty() && (nbytes_ + room > max_nbytes_ || Clock::now() >= kept_.front().until)) {
    nbytes_ -= bytes_of(kept_.front().pages).size();
    kept_.pop_front();
  }
}

}  // namespace tensorizer::device
