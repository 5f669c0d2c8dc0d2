// What one process has written to its caches and the disk has not: bounded, pushed to the disk
// range by range, and made durable when an entry rests. A thread of its own does it while there is
// something to do; loads never wait for it. Internally locked; one for the process, never
// destroyed. A forked child starts with nothing.
#pragma once

#include <chrono>
#include <deque>
#include <memory>
#include <set>
#include <stop_token>
#include <thread>

#include "core/sync.h"
#include "io/cache/cache_entry.h"

namespace tensorizer::io {

class CacheDisk {
 public:
  static CacheDisk& instance();

  static constexpr uint64_t kLimitNbytes = uint64_t{256} << 20;

  // Permission to write so many bytes; false: too many wait for the disk already, or somebody who
  // writes is held up. `patient` waits for room.
  bool reserve(uint64_t nbytes, bool patient, const std::stop_token& stop);
  // Notes that a thread writes, and afterwards how long the disk has kept it waiting: no time while
  // the processor worked, or others had it, nor what a queue of writers takes.
  class Writing {
   public:
    Writing();
    ~Writing();
    std::chrono::nanoseconds waited(uint64_t nbytes) const noexcept;
    Writing(const Writing&) = delete;
    Writing& operator=(const Writing&) = delete;

   private:
    const std::chrono::steady_clock::time_point begin_;
    const long switches_;
  };
  // They were written there: they are pushed, and their room is free then.
  void push(std::shared_ptr<CacheEntry> entry, uint64_t offset, uint64_t nbytes);
  // They were not written.
  void give_back(uint64_t nbytes);
  // The entry is not in use any more: what it holds is to survive a power cut.
  void settle(std::shared_ptr<CacheEntry> entry);

 private:
  struct Job {
    std::shared_ptr<CacheEntry> entry;
    uint64_t offset = 0;
    uint64_t nbytes = 0;  // 0: settle
  };
  void add(Job job) noexcept;
  void work() noexcept;

  Mutex mutex_;
  CondVar changed_;
  std::deque<Job> jobs_ GUARDED_BY(mutex_);
  uint64_t nbytes_ GUARDED_BY(mutex_) = 0;
  std::multiset<std::chrono::steady_clock::time_point> writing_ GUARDED_BY(mutex_);  // since when
  bool working_ GUARDED_BY(mutex_) = false;
  std::thread worker_ GUARDED_BY(mutex_);
};

}  // namespace tensorizer::io
