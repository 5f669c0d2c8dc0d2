// What one process does for its caches beside the loads, as jobs of its pool: one writes what they
// have handed over, in that order, while there is something to write and a moment longer; copies
// that are written are synced each by a job of their own. What waits to be written is bounded, and
// its memory is used again, since new pages cost more than the copies into them. Internally locked;
// one for the process, never destroyed. A forked child starts with nothing.
#pragma once

#include <chrono>
#include <deque>
#include <functional>
#include <memory>
#include <stop_token>
#include <string>
#include <utility>
#include <vector>

#include "core/pages.h"
#include "core/sync.h"

namespace tensorizer::io {

class CacheDisk {
 public:
  static CacheDisk& instance();

  static constexpr uint64_t kLimitNbytes = uint64_t{256} << 20;
  using Job = std::function<void()>;  // throws nothing

  // Memory for so many bytes that are to be written, which comes back by itself; nullptr: too much
  // waits already. `patient` waits for room, until a stop. Throws Error(out_of_memory).
  struct GiveBack {
    size_t nbytes = 0;
    void operator()(std::byte* memory) const noexcept;
  };
  using Borrowed = std::unique_ptr<std::byte[], GiveBack>;
  Borrowed borrow(uint64_t nbytes, bool patient, const std::stop_token& stop);
  // Throws std::system_error where the system has no thread to give.
  void write(Job job);
  // The same; for a job of write().
  void sync(Job job);
  // Until nothing waits to be written or synced. False: a stop, or nothing was done for so long.
  bool finish(std::chrono::milliseconds patience, const std::stop_token& stop);

  // Why a folder keeps nothing more, for the log: its path, and the reason.
  using Trouble = std::pair<std::string, std::string>;
  void note(Trouble trouble);
  std::vector<Trouble> take_troubles();

 private:
  void give_back(Pages pages) noexcept;
  void run_writes() noexcept;

  Mutex mutex_;
  CondVar changed_;
  std::deque<Job> writes_ GUARDED_BY(mutex_);  // the first one is being done
  bool writes_run_ GUARDED_BY(mutex_) = false;
  size_t syncs_ GUARDED_BY(mutex_) = 0;   // that have not ended
  uint64_t done_ GUARDED_BY(mutex_) = 0;  // writes and syncs
  uint64_t lent_nbytes_ GUARDED_BY(mutex_) = 0;
  std::vector<Pages> spare_ GUARDED_BY(mutex_);  // together with those lent at most the limit
  std::vector<Trouble> troubles_ GUARDED_BY(mutex_);
};

}  // namespace tensorizer::io
