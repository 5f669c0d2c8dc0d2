// Jobs of the process that write and sync copies for its caches beside the loads. One job writes
// what loads have handed over, in that order, and ends a moment after the last write; a job for
// each copy syncs it. The memory that waits to be written is bounded and used again, since new
// pages cost more than the copies into them. Internally locked; one for the process, never
// destroyed. A forked child starts without jobs and memory.
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

  // Memory for so many bytes that are to be written, which gives itself back; nullptr if too much
  // waits already. If `patient`, the thread waits for room, until a stop. Throws
  // Error(out_of_memory).
  struct GiveBack {
    size_t nbytes = 0;
    void operator()(std::byte* memory) const noexcept;
  };
  using Borrowed = std::unique_ptr<std::byte[], GiveBack>;
  Borrowed borrow(uint64_t nbytes, bool patient, const std::stop_token& stop);
  // Runs `job` behind those before it. Throws std::system_error if the system has no thread to
  // give.
  void write(Job job);
  // Runs `job` beside the others. Throws as write(), whose jobs call it.
  void sync(Job job);
  // Waits until all is written and synced. False: a stop, or no job ended within `patience`.
  bool finish(std::chrono::milliseconds patience, const std::stop_token& stop);

  // The path of a folder, and why it keeps nothing more, for the log.
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
