#include "core/process_pool.h"

#include <chrono>
#include <thread>

#include "core/fork.h"
#include "core/per_process.h"

namespace tensorizer {
namespace {

constexpr std::chrono::milliseconds kLinger{100};

}  // namespace

struct ProcessJob::State {
  explicit State(std::function<void()> job) : run(std::move(job)) {}

  std::function<void()> run;
  const OwnerProcess owner;
  Mutex mutex;
  CondVar changed;
  bool ended GUARDED_BY(mutex) = false;
};

void ProcessJob::join() const noexcept {
  if (!state_ || !state_->owner.is_this_one()) return;
  MutexLock lock(state_->mutex);
  state_->changed.wait(state_->mutex, {},
                       [&]() REQUIRES_LOCK(state_->mutex) { return state_->ended; });
}

ProcessPool& ProcessPool::instance() {
  static constinit PerProcess<ProcessPool> pool;
  return pool.get();
}

ProcessJob ProcessPool::start(std::function<void()> job) {
  const auto state = std::make_shared<ProcessJob::State>(std::move(job));
  {
    MutexLock lock(mutex_);
    waiting_.push_back(state);
    if (waiting_.size() > idle_) {
      try {
        std::thread([this] { work(); }).detach();
      } catch (...) {
        waiting_.pop_back();
        throw;
      }
    }
  }
  started_.notify_one();
  return ProcessJob(state);
}

void ProcessPool::work() noexcept {
  mutex_.lock();
  for (;;) {
    ++idle_;
    const bool found =
        started_.wait_until(mutex_, {}, std::chrono::steady_clock::now() + kLinger,
                            [&]() REQUIRES_LOCK(mutex_) { return !waiting_.empty(); });
    --idle_;
    if (!found) break;
    const std::shared_ptr<ProcessJob::State> job = std::move(waiting_.front());
    waiting_.pop_front();
    mutex_.unlock();
    job->run();
    job->run = nullptr;  // frees what it holds before join() returns
    {
      MutexLock lock(job->mutex);
      job->ended = true;
      job->changed.notify_all();
    }
    mutex_.lock();
  }
  mutex_.unlock();
}

}  // namespace tensorizer
