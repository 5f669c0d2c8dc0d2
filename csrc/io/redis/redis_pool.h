// Idle connections to one Redis server. Internally locked. Connections made before a fork are left
// to the parent.
#pragma once

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
  // Takes back a connection that is in step; one too many is closed.
  void give_back(std::unique_ptr<RedisHandle> handle);
  // Closes the idle connections: after one has broken, its siblings are no better.
  void close_idle();

 private:
  const RedisOptions options_;
  Mutex mutex_;
  std::vector<std::unique_ptr<RedisHandle>> idle_ GUARDED_BY(mutex_);
  int owner_pid_ GUARDED_BY(mutex_) = 0;
};

// REQUIRES: called while an exception is handled, which it rethrows when there is no further try.
void wait_before_retry(RetryState& failures, uint64_t progress_nbytes, const std::stop_token& stop);

// Runs `use(handle)` with a connection of the pool, again with a new one when the connection broke
// or the server asked for patience, as the pool's retry policy has it. `progress()` counts bytes
// moved so far.
template <class Use, class Progress>
void with_connection(RedisPool& pool, const std::stop_token& stop, Progress progress, Use use) {
  RetryState failures(pool.options().retry);
  while (true) {
    const uint64_t before = progress();
    try {
      std::unique_ptr<RedisHandle> handle = pool.take(stop);
      use(*handle);
      pool.give_back(std::move(handle));
      return;
    } catch (const RedisServerError& error) {
      if (!error.again) throw;
      wait_before_retry(failures, progress() - before, stop);
    } catch (const Error& error) {
      if (error.code() != Errc::io) throw;
      pool.close_idle();
      wait_before_retry(failures, progress() - before, stop);
    }
  }
}

}  // namespace tensorizer::io
