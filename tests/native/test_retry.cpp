// The retry policy: a pure function of time, progress and chance.
#include <gtest/gtest.h>

#include <thread>

#include "core/error.h"
#include "io/retry.h"

namespace tensorizer::io {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr double kLongest = 0.999999;

class Retry : public testing::Test {
 protected:
  RetryPolicy policy{.retries = 3,
                     .window = seconds(60),
                     .first_delay = milliseconds(100),
                     .max_delay = milliseconds(350),
                     .progress_nbytes = 1000};
  RetryState::TimePoint now;

  static std::optional<milliseconds> none() { return std::nullopt; }
};

TEST_F(Retry, delays_double_up_to_the_bound_and_end_after_the_last_retry) {
  RetryState state(policy);
  EXPECT_NEAR(static_cast<double>(state.after_failure(now, 0, kLongest, none())->count()), 100, 1);
  EXPECT_NEAR(static_cast<double>(state.after_failure(now, 0, kLongest, none())->count()), 200, 1);
  EXPECT_NEAR(static_cast<double>(state.after_failure(now, 0, kLongest, none())->count()), 350, 1);
  EXPECT_FALSE(state.after_failure(now, 0, kLongest, none()));
  EXPECT_EQ(state.failures(), 4);
}

TEST_F(Retry, chance_takes_away_up_to_half_of_a_delay) {
  for (const double chance : {0.0, 0.25, 0.5, 0.75}) {
    RetryState state(policy);
    EXPECT_NEAR(static_cast<double>(state.after_failure(now, 0, chance, none())->count()),
                50 + 50 * chance, 1);
  }
}

TEST_F(Retry, without_retries_the_first_failure_is_the_last) {
  policy.retries = 0;
  EXPECT_FALSE(RetryState(policy).after_failure(now, 1 << 20, 0, none()));
}

TEST_F(Retry, a_longer_retry_after_is_obeyed_and_a_shorter_one_changes_nothing) {
  RetryState longer(policy);
  EXPECT_EQ(longer.after_failure(now, 0, 0.5, seconds(7)), milliseconds(7000));
  RetryState shorter(policy);
  EXPECT_EQ(shorter.after_failure(now, 0, 0.5, milliseconds(1)), milliseconds(75));
}

TEST_F(Retry, a_retry_after_beyond_the_window_ends_the_tries_at_once) {
  EXPECT_FALSE(RetryState(policy).after_failure(now, 0, 0, seconds(61)));
}

TEST_F(Retry, no_try_begins_after_the_window_of_the_first_failure) {
  RetryState state(policy);
  ASSERT_TRUE(state.after_failure(now, 0, 0, none()));
  ASSERT_TRUE(state.after_failure(now + seconds(59), 0, 0, none()));
  EXPECT_FALSE(state.after_failure(now + seconds(60), 0, 0, none()));
}

TEST_F(Retry, progress_starts_the_count_and_the_window_anew) {
  RetryState state(policy);
  for (int i = 0; i < 50; ++i)
    ASSERT_TRUE(state.after_failure(now + seconds(50) * i, 1000, 0, none())) << i;
  for (int i = 0; i < 2; ++i)
    ASSERT_TRUE(state.after_failure(now + seconds(50) * 50, 999, 0, none()));
  EXPECT_FALSE(state.after_failure(now + seconds(50) * 50, 999, 0, none()));
}

TEST_F(Retry, chance_is_between_zero_and_one) {
  for (int i = 0; i < 1000; ++i) {
    const double chance = retry_chance();
    ASSERT_GE(chance, 0.0);
    ASSERT_LT(chance, 1.0);
  }
}

TEST_F(Retry, a_sleep_ends_with_the_stop_not_with_the_delay) {
  std::stop_source source;
  const auto start = std::chrono::steady_clock::now();
  std::jthread stopper([&] { source.request_stop(); });
  try {
    sleep_unless_stopped(seconds(30), source.get_token());
    FAIL() << "the stop was ignored";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Errc::cancelled);
  }
  EXPECT_LT(std::chrono::steady_clock::now() - start, seconds(10));
}

}  // namespace
}  // namespace tensorizer::io
