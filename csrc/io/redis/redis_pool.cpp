#include "io/redis/redis_pool.h"

#include <unistd.h>

namespace tensorizer::io {

std::unique_ptr<RedisHandle> RedisPool::take(const std::stop_token& stop) {
  {
    MutexLock lock(mutex_);
    if (owner_pid_ != ::getpid()) {
      // Closing our copies of the sockets does not end the parent's connections; no TLS farewell is
      // ever sent.
      idle_.clear();
      owner_pid_ = ::getpid();
    }
    if (!idle_.empty()) {
      std::unique_ptr<RedisHandle> handle = std::move(idle_.back());
      idle_.pop_back();
      return handle;
    }
  }
  return std::make_unique<RedisHandle>(options_, stop);
}

void RedisPool::give_back(std::unique_ptr<RedisHandle> handle) {
  MutexLock lock(mutex_);
  if (idle_.size() < options_.connections) idle_.push_back(std::move(handle));
}

void RedisPool::close_idle() {
  MutexLock lock(mutex_);
  idle_.clear();
}

void wait_before_retry(RetryState& failures, uint64_t progress_nbytes,
                       const std::stop_token& stop) {
  const auto delay = failures.after_failure(std::chrono::steady_clock::now(), progress_nbytes,
                                            retry_chance(), std::nullopt);
  if (!delay) throw;
  sleep_unless_stopped(*delay, stop);
}

}  // namespace tensorizer::io
