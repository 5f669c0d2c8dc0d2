#include "device/kept_memory.h"

#include <pthread.h>
#include <sys/mman.h>

namespace tensorizer::device {
namespace {

KeptMemory* the_kept = nullptr;

}  // namespace

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

// The smallest that is large enough; what is left of it stays here.
Region KeptMemory::take(uint64_t nbytes) noexcept {
  const std::lock_guard lock(mutex_);
  auto best = kept_.end();
  for (auto it = kept_.begin(); it != kept_.end(); ++it) {
    if (it->region.nbytes >= nbytes &&
        (best == kept_.end() || it->region.nbytes < best->region.nbytes))
      best = it;
  }
  if (best == kept_.end()) return {};
  const Region taken{best->region.data, nbytes};
  best->region = {taken.data + nbytes, best->region.nbytes - nbytes};
  if (best->region.nbytes == 0) kept_.erase(best);
  nbytes_ -= nbytes;
  return taken;
}

bool KeptMemory::give(Region region) noexcept {
#if defined(MADV_FREE)
  const std::lock_guard lock(mutex_);
  if (region.nbytes > max_nbytes_) return false;
  drop(region.nbytes);
  try {
    kept_.push_back({region, Clock::now() + idle_});
  } catch (...) {  // no memory
    return false;
  }
  if (madvise(region.data, region.nbytes, MADV_FREE) != 0) {
    kept_.pop_back();
    return false;
  }
  nbytes_ += region.nbytes;
  return true;
#else
  (void)region;
  return false;
#endif
}

// REQUIRES: the lock is held.
void KeptMemory::drop(uint64_t room) noexcept {
  while (!kept_.empty() && (nbytes_ + room > max_nbytes_ || Clock::now() >= kept_.front().until)) {
    const Region oldest = kept_.front().region;
    kept_.pop_front();
    nbytes_ -= oldest.nbytes;
    munmap(oldest.data, oldest.nbytes);
  }
}

}  // namespace tensorizer::device
