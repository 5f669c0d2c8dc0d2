// Runs related tasks on threads of its own; returns only when none of them can touch the caller's
// memory any more. Confined to the thread that made it (request_stop may be called from any
// thread).
#pragma once

#include <exception>
#include <functional>
#include <stop_token>
#include <thread>
#include <vector>

#include "core/sync.h"

namespace tensorizer {

// The call that a thread works for: the thread that waits for it may do some of its work. Made and
// used by bind/; threads of a TaskGroup inherit it from the thread that spawns them.
class Caller {
 protected:
  ~Caller() = default;
};

// Of this thread; null where it works for no call.
inline Caller*& current_caller() noexcept {
  static thread_local Caller* caller = nullptr;
  return caller;
}

class TaskGroup {
 public:
  TaskGroup() = default;
  ~TaskGroup();
  TaskGroup(const TaskGroup&) = delete;
  TaskGroup& operator=(const TaskGroup&) = delete;

  // Starts `task` on a new thread. The first failure asks all others to stop.
  void spawn(std::function<void(std::stop_token)> task);

  // Asks every task to stop; does not wait.
  void request_stop() noexcept { stop_.request_stop(); }
  std::stop_token stop_token() const noexcept { return stop_.get_token(); }

  // Waits for all tasks, joins their threads, and rethrows the first failure (cancellations count
  // last).
  void join();

 private:
  void run(const std::function<void(std::stop_token)>& task) noexcept;
  void join_threads() noexcept;

  std::stop_source stop_;
  std::vector<std::thread> threads_;
  Mutex mutex_;
  std::exception_ptr first_error_ GUARDED_BY(mutex_);
  bool first_error_is_cancellation_ GUARDED_BY(mutex_) = false;
};

}  // namespace tensorizer
