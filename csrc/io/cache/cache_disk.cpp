#include "io/cache/cache_disk.h"

#include <fcntl.h>
#include <sys/resource.h>

#include <algorithm>

#include "core/per_process.h"

namespace tensorizer::io {
namespace {

// Whoever writes for longer is held up.
constexpr std::chrono::milliseconds kHeldUp{250};

// Writers of one file take turns in the kernel; a disk that is not busy is ten times as fast.
constexpr uint64_t kUsualNanosecondsPerByte = 10;

// How often this thread has given the processor up to wait for something.
long voluntary_switches() noexcept {
#if defined(RUSAGE_THREAD)
  rusage usage{};
  getrusage(RUSAGE_THREAD, &usage);
  return usage.ru_nvcsw;
#else
  return 0;
#endif
}

}  // namespace

CacheDisk::Writing::Writing()
    : begin_(std::chrono::steady_clock::now()), switches_(voluntary_switches()) {
  CacheDisk& disk = instance();
  MutexLock lock(disk.mutex_);
  disk.writing_.insert(begin_);
}

CacheDisk::Writing::~Writing() {
  CacheDisk& disk = instance();
  MutexLock lock(disk.mutex_);
  const auto found = disk.writing_.find(begin_);
  if (found != disk.writing_.end()) disk.writing_.erase(found);
}

std::chrono::nanoseconds CacheDisk::Writing::waited(uint64_t nbytes) const noexcept {
  if (voluntary_switches() == switches_) return {};
  const std::chrono::nanoseconds usual(nbytes * kUsualNanosecondsPerByte);
  const std::chrono::nanoseconds took = std::chrono::steady_clock::now() - begin_;
  return std::max(took - usual, std::chrono::nanoseconds(0));
}

CacheDisk& CacheDisk::instance() {
  static constinit PerProcess<CacheDisk> disk;
  return disk.get();
}

bool CacheDisk::reserve(uint64_t nbytes, bool patient, const std::stop_token& stop) {
  MutexLock lock(mutex_);
  const auto now = std::chrono::steady_clock::now();
  if (!patient && !writing_.empty() && now - *writing_.begin() > kHeldUp) return false;
  const auto fits = [&]() REQUIRES_LOCK(mutex_) {
    return nbytes_ == 0 || nbytes_ + nbytes <= kLimitNbytes;
  };
  if (patient ? !changed_.wait(mutex_, stop, fits) : !fits()) return false;
  nbytes_ += nbytes;
  return true;
}

void CacheDisk::push(std::shared_ptr<CacheEntry> entry, uint64_t offset, uint64_t nbytes) {
  add({std::move(entry), offset, nbytes});
}

void CacheDisk::give_back(uint64_t nbytes) {
  {
    MutexLock lock(mutex_);
    nbytes_ -= std::min(nbytes_, nbytes);
  }
  changed_.notify_all();
}

void CacheDisk::settle(std::shared_ptr<CacheEntry> entry) { add({std::move(entry), 0, 0}); }

// Without a thread nothing is pushed: the kernel writes when it likes.
void CacheDisk::add(Job job) noexcept {
  try {
    MutexLock lock(mutex_);
    jobs_.push_back(std::move(job));
    if (working_) return;
    worker_ = std::thread([this] { work(); });
    working_ = true;
  } catch (const std::exception&) {
    MutexLock lock(mutex_);
    jobs_.clear();
    nbytes_ = 0;
  }
}

void CacheDisk::work() noexcept {
  for (;;) {
    Job job;
    {
      MutexLock lock(mutex_);
      if (jobs_.empty()) {
        working_ = false;
        worker_.detach();  // it ends here, and nobody may be left to join it
        return;
      }
      job = std::move(jobs_.front());
      jobs_.pop_front();
    }
    if (job.nbytes == 0) {
      job.entry->make_durable();
      continue;
    }
#if defined(SYNC_FILE_RANGE_WRITE)
    // Until it is there: what waits is bounded by this, and the kernel has no reason to hold a
    // writer up.
    sync_file_range(
        job.entry->data(), static_cast<off_t>(job.offset), static_cast<off_t>(job.nbytes),
        SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER);
#endif
    give_back(job.nbytes);
  }
}

}  // namespace tensorizer::io
