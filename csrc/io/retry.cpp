#include "io/retry.h"

#include <algorithm>
#include <random>

#include "core/stop.h"
#include "core/sync.h"

namespace tensorizer::io {

using std::chrono::milliseconds;

std::optional<milliseconds> RetryState::after_failure(
    TimePoint now, uint64_t progress_nbytes, double chance,
    std::optional<milliseconds> retry_after) noexcept {
  ++failures_;
  if (progress_nbytes >= policy_.progress_nbytes) failures_in_a_row_ = 0;
  if (failures_in_a_row_++ == 0) first_failure_ = now;
  if (failures_in_a_row_ > policy_.retries) return std::nullopt;
  milliseconds delay = std::min(policy_.first_delay, policy_.max_delay);
  for (int i = 1; i < failures_in_a_row_ && delay < policy_.max_delay; ++i)
    delay = std::min(delay * 2, policy_.max_delay);
  delay =
      milliseconds(static_cast<int64_t>(static_cast<double>(delay.count()) * (0.5 + 0.5 * chance)));
  if (retry_after) delay = std::max(delay, *retry_after);
  if (delay > policy_.window || now + delay > first_failure_ + policy_.window) return std::nullopt;
  return delay;
}

double retry_chance() {
  thread_local std::minstd_rand generator{std::random_device{}()};
  return std::uniform_real_distribution<double>(0.0, 1.0)(generator);
}

void sleep_unless_stopped(milliseconds delay, const std::stop_token& stop) {
  Mutex mutex;
  CondVar never;
  {
    MutexLock lock(mutex);
    never.wait_until(mutex, stop, std::chrono::steady_clock::now() + delay, [] { return false; });
  }
  throw_if_stopped(stop);
}

}  // namespace tensorizer::io
