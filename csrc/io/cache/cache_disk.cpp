#include "io/cache/cache_disk.h"

#include <algorithm>

#include "core/checked_math.h"
#include "core/per_process.h"
#include "core/process_pool.h"

namespace tensorizer::io {
namespace {

// For the next unit of a load that the network, not the processor, holds up.
constexpr std::chrono::milliseconds kLinger{250};
// Buffers are multiples of it, so that they fit units of about the same size.
constexpr uint64_t kBufferNbytes = uint64_t{1} << 20;

}  // namespace

CacheDisk& CacheDisk::instance() {
  static constinit PerProcess<CacheDisk> disk;
  return disk.get();
}

void CacheDisk::GiveBack::operator()(std::byte* memory) const noexcept {
  instance().give_back(Pages(memory, {nbytes}));
}

CacheDisk::Borrowed CacheDisk::borrow(uint64_t nbytes, bool patient, const std::stop_token& stop) {
  MutexLock lock(mutex_);
  const auto fits = [&]() REQUIRES_LOCK(mutex_) {
    return lent_nbytes_ == 0 || lent_nbytes_ + nbytes <= kLimitNbytes;
  };
  if (patient ? !changed_.wait(mutex_, stop, fits) : lent_nbytes_ + nbytes > kLimitNbytes)
    return nullptr;
  const auto found = std::ranges::find_if(
      spare_, [&](const Pages& pages) { return bytes_of(pages).size() >= nbytes; });
  Pages pages;
  if (found != spare_.end()) {
    pages = std::move(*found);
    spare_.erase(found);
  } else {
    spare_.clear();  // too small, all of them
    pages = allocate_pages(static_cast<size_t>(align_up(nbytes, kBufferNbytes)));
  }
  const size_t lent = bytes_of(pages).size();
  lent_nbytes_ += lent;
  return {pages.release(), {lent}};
}

void CacheDisk::give_back(Pages pages) noexcept {
  {
    MutexLock lock(mutex_);
    // In a forked child, memory that the parent has borrowed is not counted.
    lent_nbytes_ -= std::min<uint64_t>(lent_nbytes_, bytes_of(pages).size());
    try {
      if (writes_run_) spare_.push_back(std::move(pages));
    } catch (const std::bad_alloc&) {  // the system gets it back
    }
  }
  changed_.notify_all();
}

void CacheDisk::write(Job job) {
  {
    MutexLock lock(mutex_);
    writes_.push_back(std::move(job));
    if (!writes_run_) {
      try {
        ProcessPool::instance().start([this] { run_writes(); });
      } catch (...) {
        writes_.pop_back();
        throw;
      }
      writes_run_ = true;
    }
  }
  changed_.notify_all();
}

void CacheDisk::run_writes() noexcept {
  mutex_.lock();
  const auto has_writes = [&]() REQUIRES_LOCK(mutex_) { return !writes_.empty(); };
  while (changed_.wait_until(mutex_, {}, std::chrono::steady_clock::now() + kLinger, has_writes)) {
    Job job = std::move(writes_.front());
    mutex_.unlock();
    job();
    job = nullptr;  // frees its memory before a waiting thread hears that it is done
    mutex_.lock();
    writes_.pop_front();
    ++done_;
    changed_.notify_all();
  }
  writes_run_ = false;
  spare_.clear();
  mutex_.unlock();
}

void CacheDisk::sync(Job job) {
  MutexLock lock(mutex_);
  ++syncs_;
  try {
    ProcessPool::instance().start([this, job = std::move(job)]() mutable {
      job();
      job = nullptr;
      MutexLock ended(mutex_);
      --syncs_;
      ++done_;
      changed_.notify_all();
    });
  } catch (...) {
    --syncs_;
    throw;
  }
}

bool CacheDisk::finish(std::chrono::milliseconds patience, const std::stop_token& stop) {
  MutexLock lock(mutex_);
  // What was written is handed over to be synced before it counts as done.
  const auto is_idle = [&]() REQUIRES_LOCK(mutex_) { return writes_.empty() && syncs_ == 0; };
  while (!is_idle()) {
    const uint64_t before = done_;
    const auto until = std::chrono::steady_clock::now() + patience;
    if (!changed_.wait_until(mutex_, stop, until,
                             [&]() REQUIRES_LOCK(mutex_) { return is_idle() || done_ != before; }))
      return is_idle();
  }
  return true;
}

void CacheDisk::note(Trouble trouble) {
  MutexLock lock(mutex_);
  if (std::ranges::find(troubles_, trouble) == troubles_.end())
    troubles_.push_back(std::move(trouble));
}

std::vector<CacheDisk::Trouble> CacheDisk::take_troubles() {
  MutexLock lock(mutex_);
  return std::exchange(troubles_, {});
}

}  // namespace tensorizer::io
