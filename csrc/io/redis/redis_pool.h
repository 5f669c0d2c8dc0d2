// Idle connections to one Redis server. Internally locked. Connections made before a fork are left
// to the parent.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "core/sync.h"
#include "io/redis/redis_handle.h"

namespace tensorizer::io {

class RedisPool {
 public:
  explicit RedisPool(RedisOptions options) : options_(std::move(options)) {}

  const RedisOptions& options() const noexcept { return options_; }

  // An idle connection, or a new one.
  std::unique_ptr<RedisHandle> take(const std::stop_token& stop);
  // Takes back a connection that is in step; one too many, or one that was open at a close(), is
  // ended.
  void give_back(std::unique_ptr<RedisHandle> handle);
  // Ends the idle connections: after one has broken, its siblings are no better.
  void close_idle();
  // Ends idle connections now and the others when they come back. Later ones are new.
  void close();

  // Whether the server has ever answered.
  bool answered() const noexcept { return answered_.load(std::memory_order_relaxed); }
  void note_answer() noexcept { answered_.store(true, std::memory_order_relaxed); }

 private:
  const RedisOptions options_;
  std::atomic<bool> answered_{false};
  Mutex mutex_;
  FreshInChild<std::vector<std::unique_ptr<RedisHandle>>> idle_ GUARDED_BY(mutex_);
  uint64_t closed_times_ GUARDED_BY(mutex_) = 0;
};

// REQUIRES: called while an exception is handled, which it rethrows when there is no further try,
// with a hint where the server has never answered.
void wait_before_retry(RetryState& failures, const FailedTry& failed, const std::stop_token& stop);

// Runs `use(handle)` with a connection of the pool, again with a new one when the connection broke
// or the server asked for patience, as the pool's retry policy has it. `progress()` counts bytes
// moved so far.
template <class Use, class Progress>
void with_connection(RedisPool& pool, const std::stop_token& stop, Progress progress, Use use) {
  RetryState failures(pool.options().retry);
  while (true) {
    const uint64_t before = progress();
    std::unique_ptr<RedisHandle> handle;
    const auto failed = [&] {
      if (handle && handle->answered()) pool.note_answer();
      return FailedTry{progress() - before, pool.answered()};
    };
    try {
      handle = pool.take(stop);
      use(*handle);
      pool.note_answer();
      pool.give_back(std::move(handle));
      return;
    } catch (const RedisServerError& error) {
      if (!error.again) throw;
      pool.note_answer();
      wait_before_retry(failures, failed(), stop);
    } catch (const SocketError& error) {
      if (!error.passing) throw;
      pool.close_idle();
      wait_before_retry(failures, failed(), stop);
    }
  }
}

}  // namespace tensorizer::io
