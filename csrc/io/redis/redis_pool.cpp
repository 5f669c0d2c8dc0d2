#include "io/redis/redis_pool.h"

namespace tensorizer::io {

std::unique_ptr<RedisHandle> RedisPool::take(const std::stop_token& stop) {
  uint64_t closed_times = 0;
  {
    MutexLock lock(mutex_);
    std::vector<std::unique_ptr<RedisHandle>>& idle = *idle_;
    while (!idle.empty()) {
      std::unique_ptr<RedisHandle> handle = std::move(idle.back());
      idle.pop_back();
      if (handle->is_usable()) return handle;
    }
    closed_times = closed_times_;
  }
  auto handle = std::make_unique<RedisHandle>(options_, stop);
  handle->generation = closed_times;
  return handle;
}

void RedisPool::give_back(std::unique_ptr<RedisHandle> handle) {
  MutexLock lock(mutex_);
  if (handle->generation == closed_times_ && idle_->size() < options_.connections)
    idle_->push_back(std::move(handle));
}

void RedisPool::close_idle() {
  MutexLock lock(mutex_);
  idle_->clear();
}

void RedisPool::close() {
  MutexLock lock(mutex_);
  ++closed_times_;
  idle_->clear();
}

void wait_before_retry(RetryState& failures, const FailedTry& failed, const std::stop_token& stop) {
  const auto delay = failures.after_failure(failed);
  if (delay) return failures.wait(*delay, stop);
  if (failures.end() != RetryEnd::never_answered) throw;
  try {
    throw;
  } catch (const SocketError& error) {
    SocketError explained(std::string(error.what()) + "; " + kNeverAnsweredHint, error.source,
                          false);
    explained.system_errno = error.system_errno;
    throw explained;
  }
}

}  // namespace tensorizer::io
