#include "io/cache/cache_disk.h"

#include <sys/resource.h>

#include <algorithm>
#include <thread>

#include "core/per_process.h"

namespace tensorizer::io {
namespace {

constexpr int kNice = 10;

// Loads come first. (On Linux this is about the calling thread.)
void step_back() noexcept {
#if defined(__linux__)
  setpriority(PRIO_PROCESS, 0, std::max(kNice, getpriority(PRIO_PROCESS, 0)));
#endif
}

}  // namespace

CacheDisk& CacheDisk::instance() {
  static constinit PerProcess<CacheDisk> disk;
  return disk.get();
}

bool CacheDisk::reserve(uint64_t nbytes, bool patient, const std::stop_token& stop) {
  MutexLock lock(mutex_);
  const auto fits = [&]() REQUIRES_LOCK(mutex_) {
    return nbytes_ == 0 || nbytes_ + nbytes <= kLimitNbytes;
  };
  if (patient ? !changed_.wait(mutex_, stop, fits) : nbytes_ + nbytes > kLimitNbytes) return false;
  nbytes_ += nbytes;
  return true;
}

void CacheDisk::give_back(uint64_t nbytes) noexcept {
  {
    MutexLock lock(mutex_);
    nbytes_ -= nbytes;
  }
  changed_.notify_all();
}

void CacheDisk::add(Lane CacheDisk::* which, Job job) {
  MutexLock lock(mutex_);
  Lane& lane = this->*which;
  lane.jobs.push_back(std::move(job));
  if (lane.jobs.size() > 1) return;
  try {
    std::thread([this, which] { work(which); }).detach();  // nobody may be left to join it
  } catch (...) {
    lane.jobs.pop_back();
    throw;
  }
}

void CacheDisk::work(Lane CacheDisk::* which) noexcept {
  step_back();
  mutex_.lock();
  Lane& lane = this->*which;
  while (!lane.jobs.empty()) {
    Job job = std::move(lane.jobs.front());
    mutex_.unlock();
    job();
    job = nullptr;  // what it holds goes before somebody hears that it is done
    mutex_.lock();
    lane.jobs.pop_front();
    ++lane.done;
    changed_.notify_all();
  }
  mutex_.unlock();
}

bool CacheDisk::finish(std::chrono::milliseconds patience, const std::stop_token& stop) {
  MutexLock lock(mutex_);
  for (;;) {
    const uint64_t before = writing_.done;
    const auto until = std::chrono::steady_clock::now() + patience;
    const bool in_time = changed_.wait_until(mutex_, stop, until, [&]() REQUIRES_LOCK(mutex_) {
      return writing_.jobs.empty() || writing_.done != before;
    });
    if (writing_.jobs.empty()) return true;
    if (!in_time) return false;
  }
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
