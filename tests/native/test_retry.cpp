// The retry policy: a pure function of time, progress and chance.
#include <gtest/gtest.h>

#include <thread>

#include "core/error.h"
#include "io/retry.h"
#include "virtual_clock.h"

namespace tensorizer::io {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

class Retry : public testing::Test {
 protected:
  VirtualClock time;
  RetryPolicy policy{.retries = 3,
                     .window = seconds(60),
                     .first_answer_window = seconds(10),
                     .first_delay = milliseconds(100),
                     .max_delay = milliseconds(350),
                     .progress_nbytes = 1000,
                     .clock = &time.clock};

  // Fails until there is no further try; returns the time that passed.
  milliseconds fail_to_the_end(const FailedTry& failed) {
    RetryState state(policy);
    const milliseconds begin = time.elapsed();
    while (const auto delay = state.after_failure(failed)) state.wait(*delay, {});
    ended = state.end();
    tries = state.failures();
    return time.elapsed() - begin;
  }
  RetryEnd ended = RetryEnd::none;
  int tries = 0;
};

TEST_F(Retry, DelaysDoubleUpToTheBoundAndEndAfterTheLastRetry) {
  RetryState state(policy);
  EXPECT_NEAR(static_cast<double>(state.after_failure({})->count()), 100, 1);
  EXPECT_NEAR(static_cast<double>(state.after_failure({})->count()), 200, 1);
  EXPECT_NEAR(static_cast<double>(state.after_failure({})->count()), 350, 1);
  EXPECT_FALSE(state.after_failure({}));
  EXPECT_EQ(state.failures(), 4);
  EXPECT_EQ(state.end(), RetryEnd::count);
}

TEST_F(Retry, ChanceTakesAwayUpToHalfOfADelay) {
  for (const double chance : {0.0, 0.25, 0.5, 0.75}) {
    time.clock.chance = [chance] { return chance; };
    EXPECT_NEAR(static_cast<double>(RetryState(policy).after_failure({})->count()),
                50 + 50 * chance, 1);
  }
}

TEST_F(Retry, WithoutRetriesTheFirstFailureIsTheLast) {
  policy.retries = 0;
  EXPECT_FALSE(RetryState(policy).after_failure({.progress_nbytes = 1 << 20}));
}

TEST_F(Retry, WithoutACountAServerThatHasAnsweredIsTriedForTheWholeWindow) {
  policy = RetryPolicy{.clock = &time.clock};
  EXPECT_EQ(fail_to_the_end({}), seconds(120));
  EXPECT_EQ(ended, RetryEnd::time);
  EXPECT_GE(time.longest_delay(), milliseconds(14'999));
  EXPECT_LT(tries, 20);
}

TEST_F(Retry, AServerThatHasNeverAnsweredIsGivenUpAfterTenSeconds) {
  policy = RetryPolicy{.clock = &time.clock};
  EXPECT_EQ(fail_to_the_end({.answered = false}), seconds(10));
  EXPECT_EQ(ended, RetryEnd::never_answered);
  EXPECT_GT(tries, 5);
}

TEST_F(Retry, AFirstTryThatTakesAsLongAsThatIsTheLast) {
  policy = RetryPolicy{.clock = &time.clock};
  RetryState state(policy);
  time.pass(seconds(10));  // a connect timeout
  EXPECT_FALSE(state.after_failure({.answered = false}));
  EXPECT_EQ(state.end(), RetryEnd::never_answered);
}

TEST_F(Retry, AServerThatAnswersAtLastHasTheWholeWindow) {
  policy = RetryPolicy{.clock = &time.clock};
  RetryState state(policy);
  while (time.elapsed() < seconds(9)) state.wait(*state.after_failure({.answered = false}), {});
  time.pass(seconds(60));
  EXPECT_TRUE(state.after_failure({.answered = true}));
}

TEST_F(Retry, NoTimeForRetriesMeansOneTry) {
  policy = RetryPolicy{.window = seconds(0), .clock = &time.clock};
  EXPECT_EQ(fail_to_the_end({}), seconds(0));
  EXPECT_EQ(tries, 1);
}

TEST_F(Retry, DelaysOfZeroDoNotKeepTheProcessorBusy) {
  policy = RetryPolicy{.first_delay = seconds(0), .max_delay = seconds(0), .clock = &time.clock};
  EXPECT_EQ(fail_to_the_end({}), seconds(120));
  EXPECT_LE(tries, 12'001);
}

TEST_F(Retry, ALongerRetryAfterIsObeyedAndAShorterOneChangesNothing) {
  time.clock.chance = [] { return 0.5; };
  EXPECT_EQ(RetryState(policy).after_failure({.retry_after = seconds(7)}), milliseconds(7000));
  EXPECT_EQ(RetryState(policy).after_failure({.retry_after = milliseconds(1)}), milliseconds(75));
}

TEST_F(Retry, ARetryAfterBeyondTheWindowEndsTheTriesAtOnce) {
  RetryState state(policy);
  EXPECT_FALSE(state.after_failure({.retry_after = seconds(61)}));
  EXPECT_EQ(state.end(), RetryEnd::asked_to_wait);
}

TEST_F(Retry, NoTryBeginsAfterTheWindowOfTheFirstFailure) {
  RetryState state(policy);
  ASSERT_TRUE(state.after_failure({}));
  time.pass(milliseconds(59'950));
  EXPECT_EQ(state.after_failure({}), milliseconds(50));  // and one ends with it
  time.pass(milliseconds(50));
  EXPECT_FALSE(state.after_failure({}));
}

TEST_F(Retry, ProgressStartsTheCountAndTheWindowAnew) {
  RetryState state(policy);
  for (int i = 0; i < 50; ++i, time.pass(seconds(50)))
    ASSERT_TRUE(state.after_failure({.progress_nbytes = 1000})) << i;
  for (int i = 0; i < 2; ++i) ASSERT_TRUE(state.after_failure({.progress_nbytes = 10}));
  EXPECT_FALSE(state.after_failure({.progress_nbytes = 10}));
}

TEST_F(Retry, LittleProgressAddsUp) {
  RetryState state(policy);
  for (int i = 0; i < 50; ++i, time.pass(seconds(20)))
    ASSERT_TRUE(state.after_failure({.progress_nbytes = 500})) << i;
}

TEST_F(Retry, ChanceIsBetweenZeroAndOne) {
  for (int i = 0; i < 1000; ++i) {
    const double chance = retry_chance();
    ASSERT_GE(chance, 0.0);
    ASSERT_LT(chance, 1.0);
  }
}

TEST_F(Retry, ASleepEndsWithTheStopNotWithTheDelay) {
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
