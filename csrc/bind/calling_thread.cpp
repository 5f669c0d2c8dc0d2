#include "bind/calling_thread.h"

#include <stop_token>

#include "core/error.h"

namespace tensorizer::bind {
namespace {

std::exception_ptr cancellation() {
  return std::make_exception_ptr(Error(Errc::cancelled, "the call was interrupted"));
}

}  // namespace

void CallingThread::run(const std::function<void()>& function) {
  Work work{&function};
  MutexLock lock(mutex_);
  if (refuses_) std::rethrow_exception(cancellation());
  waiting_.push_back(&work);
  changed_.notify_all();
  changed_.wait(mutex_, std::stop_token(), [&] { return work.done; });
  if (work.error) std::rethrow_exception(work.error);
}

void CallingThread::finish() noexcept {
  MutexLock lock(mutex_);
  finished_ = true;
  changed_.notify_all();
}

CallingThread::Event CallingThread::wait(std::chrono::milliseconds timeout) {
  MutexLock lock(mutex_);
  changed_.wait_until(mutex_, std::stop_token(), std::chrono::steady_clock::now() + timeout,
                      [this]() REQUIRES_LOCK(mutex_) { return finished_ || !waiting_.empty(); });
  if (!waiting_.empty()) return Event::work;
  return finished_ ? Event::finished : Event::nothing;
}

void CallingThread::serve() {
  Work* work = nullptr;
  {
    MutexLock lock(mutex_);
    if (waiting_.empty()) return;
    work = waiting_.front();
    waiting_.pop_front();
  }
  std::exception_ptr error;
  try {
    (*work->function)();
  } catch (...) {
    error = std::current_exception();
  }
  MutexLock lock(mutex_);
  work->error = std::move(error);
  work->done = true;
  changed_.notify_all();
}

void CallingThread::refuse() noexcept {
  MutexLock lock(mutex_);
  refuses_ = true;
  for (Work* work : waiting_) {
    work->error = cancellation();
    work->done = true;
  }
  waiting_.clear();
  changed_.notify_all();
}

void CallingThread::interrupt() {
  MutexLock lock(mutex_);
  for (const unsigned long ident : running_)
    PyThreadState_SetAsyncExc(ident, PyExc_KeyboardInterrupt);
}

CallingThread::Running::Running() : call_(current_call()) {
  if (call_ == nullptr) return;
  MutexLock lock(call_->mutex_);
  if (call_->refuses_) std::rethrow_exception(cancellation());
  call_->running_.insert(PyThread_get_thread_ident());
}

CallingThread::Running::~Running() {
  if (call_ == nullptr) return;
  MutexLock lock(call_->mutex_);
  call_->running_.erase(call_->running_.find(PyThread_get_thread_ident()));
}

}  // namespace tensorizer::bind
