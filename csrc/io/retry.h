// When a failed request is tried again, and after how long. Time, chance and sleep are replaceable.
//
// What is worth a retry is decided where the failure is understood. Here: tries go on until
// `window` has passed without progress; `retries`, where it is set, bounds their number as well. A
// server that has never answered is given up `first_answer_window` after the first try began: it is
// more likely the wrong one than one that will come back. Bytes add up: every `progress_nbytes`
// start time, count and delay anew, so a long transfer over a bad line ends, and one that stands
// still gives up. Delays double from `first_delay` to `max_delay`, half of each chosen by chance so
// that many clients that failed together do not come back together; the last one ends with the
// window. A server's Retry-After is obeyed when it is longer.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <stop_token>

#include "core/error.h"

namespace tensorizer::io {

// Uniform in [0, 1), from a generator of the calling thread.
double retry_chance();

// Sleeps for `delay`; throws Errc::cancelled as soon as a stop is requested.
void sleep_unless_stopped(std::chrono::milliseconds delay, const std::stop_token& stop);

// Where time and chance come from. Tests bring their own, called from any thread.
struct RetryClock {
  using TimePoint = std::chrono::steady_clock::time_point;

  std::function<TimePoint()> now = [] { return std::chrono::steady_clock::now(); };
  std::function<double()> chance = retry_chance;
  std::function<void(std::chrono::milliseconds, const std::stop_token&)> sleep =
      sleep_unless_stopped;

  static const RetryClock& real();
};

struct RetryPolicy {
  std::optional<int> retries;  // nullopt: time alone bounds them
  std::chrono::milliseconds window{120'000};
  std::chrono::milliseconds first_answer_window{10'000};
  std::chrono::milliseconds first_delay{200};
  std::chrono::milliseconds max_delay{15'000};
  uint64_t progress_nbytes = uint64_t{256} << 10;
  const RetryClock* clock = &RetryClock::real();  // outlives what uses the policy
};

// What the policy wants to know of a try that failed.
struct FailedTry {
  uint64_t progress_nbytes = 0;  // new bytes that it brought
  bool answered = true;          // whether the server has ever answered
  std::optional<std::chrono::milliseconds> retry_after = std::nullopt;
  bool passing = true;  // another try may do better
  bool silent = false;  // the server said nothing for as long as a stall takes
};

// `none`: another try would not help.
enum class RetryEnd : uint8_t { none, count, time, never_answered, asked_to_wait };

// The failures of one operation so far, which begins with the constructor. Confined to one thread.
class RetryState {
 public:
  using TimePoint = RetryClock::TimePoint;

  explicit RetryState(const RetryPolicy& policy)
      : policy_(policy), begin_(policy.clock->now()), first_failure_(begin_) {}

  // Returns the time to wait before the next try, or nullopt when there is none.
  std::optional<std::chrono::milliseconds> after_failure(const FailedTry& failed);

  // Waits for as long as `delay` says.
  void wait(std::chrono::milliseconds delay, const std::stop_token& stop) const {
    policy_.clock->sleep(delay, stop);
  }

  // Tries that failed, over the whole operation.
  int failures() const noexcept { return failures_; }
  // Why there is no further try.
  RetryEnd end() const noexcept { return end_; }

 private:
  std::optional<std::chrono::milliseconds> give_up(RetryEnd why) noexcept {
    end_ = why;
    return std::nullopt;
  }

  RetryPolicy policy_;
  TimePoint begin_;
  TimePoint first_failure_;  // since the last progress
  int failures_ = 0;
  int failures_in_a_row_ = 0;
  uint64_t progress_nbytes_ = 0;  // since time and count began
  RetryEnd end_ = RetryEnd::none;
};

// The hint for a server that never answered.
inline constexpr const char* kNeverAnsweredHint =
    "the server has not answered once: check host, port and network";

// Calls attempt(), which throws Failure, until it returns. judge(failure) says what the policy
// wants to know of a try; give_up(failure, state) gets the last one within its handler, and throws.
// Throws Error(cancelled) as soon as a stop is requested.
template <class Failure, class Attempt, class Judge, class GiveUp>
void with_retries(const RetryPolicy& policy, const std::stop_token& stop, Attempt&& attempt,
                  Judge&& judge, GiveUp&& give_up) {
  RetryState state(policy);
  for (;;) {
    std::optional<std::chrono::milliseconds> delay;
    try {
      return attempt();
    } catch (const Failure& failure) {
      throw_if_stopped(stop);
      delay = state.after_failure(judge(failure));
      if (!delay) give_up(failure, state);
    }
    state.wait(*delay, stop);
  }
}

}  // namespace tensorizer::io
