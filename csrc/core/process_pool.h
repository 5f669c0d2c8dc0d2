// Threads for work of the process: what goes on between calls, or for several of them. Loads and
// saves have threads of their own (run_units). A thread whose job has ended waits a moment for the
// next one, then ends. Each job has a thread at once, so that jobs may wait for each other.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <utility>

#include "core/sync.h"

namespace tensorizer {

// A job of the pool. Letting go of it neither ends the job nor waits for it.
class ProcessJob {
 public:
  ProcessJob() = default;

  // Returns when the job has ended, at once where there is none. In a forked child, too: threads of
  // the parent do not run there.
  void join() const noexcept;

 private:
  friend class ProcessPool;
  struct State;
  explicit ProcessJob(std::shared_ptr<State> state) : state_(std::move(state)) {}

  std::shared_ptr<State> state_;
};

// Internally locked; one for the process, never destroyed. A forked child starts with no thread.
class ProcessPool {
 public:
  static ProcessPool& instance();

  // Runs `job`, which throws nothing, on a thread of the pool from now on. Throws
  // std::system_error where the system has no thread to give.
  ProcessJob start(std::function<void()> job);

 private:
  void work() noexcept;

  Mutex mutex_;
  CondVar started_;
  std::deque<std::shared_ptr<ProcessJob::State>> waiting_ GUARDED_BY(mutex_);
  size_t idle_ GUARDED_BY(mutex_) = 0;  // threads
};

}  // namespace tensorizer
