#include "device/kept_memory.h"

#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <new>

namespace tensorizer::device {
namespace {

KeptMemory* the_kept = nullptr;

void unmap(const Region& region) noexcept { munmap(region.data, region.nbytes); }

}  // namespace

KeptMemory& KeptMemory::instance() {
  static auto* const kept = new KeptMemory;
  return *kept;
}

// The lock is held across a fork, so that the child finds everything in order; it has no watcher,
// and what is kept would be copied page by page: it goes.
KeptMemory::KeptMemory() {
  the_kept = this;
  pthread_atfork([] { the_kept->mutex_.lock(); }, [] { the_kept->mutex_.unlock(); },
                 [] {
                   while (!the_kept->kept_.empty()) unmap(the_kept->take_oldest());
                   the_kept->watched_ = false;
                   new (&the_kept->watcher_) std::thread;  // the old one is the parent's
                   new (&the_kept->changed_) std::condition_variable;  // who waited is not here
                   the_kept->mutex_.unlock();
                 });
}

void KeptMemory::configure(uint64_t max_nbytes, std::chrono::milliseconds idle) {
  std::deque<Kept> surplus;
  {
    const std::lock_guard lock(mutex_);
    max_nbytes_ = idle.count() > 0 ? max_nbytes : 0;
    idle_ = idle;
    while (nbytes_ > max_nbytes_) surplus.push_back({take_oldest(), {}});
    changed_.notify_all();
  }
  for (const Kept& kept : surplus) unmap(kept.region);
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
  try {
    ensure_watched();
    if (madvise(region.data, region.nbytes, MADV_FREE) != 0) return false;
    kept_.push_back({region, Clock::now() + idle_});
  } catch (...) {  // no memory, or no thread
    return false;
  }
  nbytes_ += region.nbytes;
  if (nbytes_ > max_nbytes_) changed_.notify_all();
  return true;
#else
  (void)region;
  return false;
#endif
}

// REQUIRES: the lock is held, and something is kept.
Region KeptMemory::take_oldest() noexcept {
  const Region oldest = kept_.front().region;
  kept_.pop_front();
  nbytes_ -= oldest.nbytes;
  return oldest;
}

// REQUIRES: the lock is held, and something is kept. Whether the oldest has to go.
bool KeptMemory::is_due() const noexcept {
  return nbytes_ > max_nbytes_ || Clock::now() >= kept_.front().until;
}

// REQUIRES: the lock is held.
void KeptMemory::ensure_watched() {
  if (watched_) return;
  if (watcher_.joinable()) watcher_.join();  // it has nothing left to do
  watcher_ = std::thread([this] { watch(); });
  watched_ = true;
}

void KeptMemory::watch() noexcept {
  std::unique_lock lock(mutex_);
  while (!kept_.empty()) {
    if (!is_due()) {
      changed_.wait_until(lock, Clock::time_point(kept_.front().until));
      continue;
    }
    const Region oldest = take_oldest();
    lock.unlock();
    unmap(oldest);
    lock.lock();
  }
  watched_ = false;
}

}  // namespace tensorizer::device
