// When a failed request is tried again, and after how long. Pure: time and chance are arguments.
//
// What is worth a retry is decided where the failure is understood (http_check.h). Here: a first
// try and up to `retries` more, as long as they begin within `window` of the first failure. A try
// that moved at least `progress_nbytes` forward starts the count anew, so a long transfer over a
// bad line ends, and one that stands still gives up. Delays double from `first_delay` to
// `max_delay`, half of each chosen by chance so that many clients that failed together do not come
// back together; a server's Retry-After is obeyed when it is longer.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <stop_token>

namespace tensorizer::io {

struct RetryPolicy {
  int retries = 4;
  std::chrono::milliseconds window{120'000};
  std::chrono::milliseconds first_delay{200};
  std::chrono::milliseconds max_delay{15'000};
  uint64_t progress_nbytes = uint64_t{256} << 10;
};

// The failures of one operation so far. Confined to one thread.
class RetryState {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;

  explicit RetryState(const RetryPolicy& policy) noexcept : policy_(policy) {}

  // A try failed at `now` after `progress_nbytes` new bytes; `chance` is uniform in [0, 1). Returns
  // the time to wait before the next try, or nullopt when there is none.
  std::optional<std::chrono::milliseconds> after_failure(
      TimePoint now, uint64_t progress_nbytes, double chance,
      std::optional<std::chrono::milliseconds> retry_after) noexcept;

  // Tries that failed, over the whole operation.
  int failures() const noexcept { return failures_; }

 private:
  RetryPolicy policy_;
  int failures_ = 0;
  int failures_in_a_row_ = 0;
  TimePoint first_failure_;
};

// Uniform in [0, 1), from a generator of the calling thread.
double retry_chance();

// Sleeps for `delay`; throws Errc::cancelled as soon as a stop is requested.
void sleep_unless_stopped(std::chrono::milliseconds delay, const std::stop_token& stop);

}  // namespace tensorizer::io
