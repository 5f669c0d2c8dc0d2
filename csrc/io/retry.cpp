#include "io/retry.h"

#include <algorithm>
#include <random>

#include "core/error.h"
#include "core/sync.h"

namespace tensorizer::io {

using std::chrono::milliseconds;

namespace {
constexpr milliseconds kShortestDelay{10};  // where no count ends the tries
}

const RetryClock& RetryClock::real() {
  static const RetryClock& clock = *new RetryClock;
  return clock;
}

std::optional<milliseconds> RetryState::after_failure(const FailedTry& failed) {
  const TimePoint now = policy_.clock->now();
  ++failures_;
  if (!failed.passing) return give_up(RetryEnd::none);
  progress_nbytes_ += failed.progress_nbytes;
  if (progress_nbytes_ >= policy_.progress_nbytes) {
    progress_nbytes_ = 0;
    failures_in_a_row_ = 0;
  }
  if (failures_in_a_row_++ == 0) first_failure_ = now;
  if (policy_.retries && failures_in_a_row_ > *policy_.retries) return give_up(RetryEnd::count);

  const TimePoint end = failed.answered
                            ? first_failure_ + policy_.window
                            : begin_ + std::min(policy_.window, policy_.first_answer_window);
  const auto left = std::chrono::duration_cast<milliseconds>(end - now);
  if (left.count() <= 0)
    return give_up(failed.answered ? RetryEnd::time : RetryEnd::never_answered);
  // Another try would wait as long for a server that has never said anything.
  if (failed.silent && !failed.answered) return give_up(RetryEnd::never_answered);
  if (failed.retry_after && *failed.retry_after > left) return give_up(RetryEnd::asked_to_wait);

  milliseconds delay = std::min(policy_.first_delay, policy_.max_delay);
  for (int i = 1; i < failures_in_a_row_ && delay < policy_.max_delay; ++i)
    delay = std::min(delay * 2, policy_.max_delay);
  const double part = 0.5 + 0.5 * policy_.clock->chance();
  delay = milliseconds(static_cast<int64_t>(static_cast<double>(delay.count()) * part));
  if (!policy_.retries) delay = std::max(delay, kShortestDelay);
  delay = std::min(delay, left);
  if (failed.retry_after) delay = std::max(delay, *failed.retry_after);
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
