#include "core/task_group.h"

#include "core/error.h"

namespace tensorizer {

TaskGroup::~TaskGroup() {
  stop_.request_stop();
  join_threads();
}

void TaskGroup::spawn(std::function<void(std::stop_token)> task) {
  threads_.emplace_back([this, task = std::move(task), caller = current_caller()] {
    current_caller() = caller;
    run(task);
  });
}

void TaskGroup::run(const std::function<void(std::stop_token)>& task) noexcept {
  std::exception_ptr error;
  bool cancelled = false;
  try {
    task(stop_.get_token());
  } catch (const Error& e) {
    error = std::current_exception();
    cancelled = e.code() == Errc::cancelled;
  } catch (...) {
    error = std::current_exception();
  }
  if (error) stop_.request_stop();
  MutexLock lock(mutex_);
  if (error && (!first_error_ || (first_error_is_cancellation_ && !cancelled))) {
    first_error_ = error;
    first_error_is_cancellation_ = cancelled;
  }
}

void TaskGroup::join_threads() noexcept {
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

void TaskGroup::join() {
  join_threads();
  std::exception_ptr error;
  {
    MutexLock lock(mutex_);
    error = std::exchange(first_error_, nullptr);
  }
  if (error) std::rethrow_exception(error);
}

}  // namespace tensorizer
