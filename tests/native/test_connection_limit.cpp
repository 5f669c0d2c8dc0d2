// How many requests of a source run at the same time.
#include <gtest/gtest.h>

#include "io/http/connection_limit.h"

namespace tensorizer::io {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

ConnectionLimit::TimePoint at(milliseconds time) {
  return ConnectionLimit::TimePoint(seconds(1000) + time);
}

TEST(ConnectionLimit, ANearServerGetsSixteenAndOneThatIsFarAwaySixtyFour) {
  ConnectionLimit limit(0, 100);
  EXPECT_EQ(limit.get(), 16u);
  limit.note_first_answer(milliseconds(9));
  EXPECT_EQ(limit.get(), 16u);
  limit.note_first_answer(milliseconds(10));
  EXPECT_EQ(limit.get(), 64u);
}

TEST(ConnectionLimit, TheBoundHoldsForEveryNumber) {
  ConnectionLimit limit(0, 5);
  EXPECT_EQ(limit.get(), 5u);
  EXPECT_EQ(ConnectionLimit(20, 5).get(), 5u);
  limit.fix(9);
  EXPECT_EQ(limit.get(), 5u);
  limit.fix(0);
  EXPECT_EQ(limit.get(), 1u);
}

TEST(ConnectionLimit, AnOverloadedServerGetsHalfForGood) {
  ConnectionLimit limit(0, 64);
  limit.note_overload(at(seconds(0)), at(milliseconds(100)));
  EXPECT_EQ(limit.get(), 8u);
  limit.note_overload(at(milliseconds(110)), at(milliseconds(120)));
  EXPECT_EQ(limit.get(), 4u);
  for (int i = 1; i < 20; ++i) limit.note_overload(at(seconds(i)), at(seconds(i)));
  EXPECT_EQ(limit.get(), 1u);
}

TEST(ConnectionLimit, RequestsThatBeganBeforeTheLimitChangedDoNotHalveItAgain) {
  ConnectionLimit limit(0, 64);
  for (int i = 0; i < 16; ++i) limit.note_overload(at(milliseconds(i)), at(milliseconds(100 + i)));
  EXPECT_EQ(limit.get(), 8u);
}

TEST(ConnectionLimit, AFixedNumberStays) {
  ConnectionLimit fixed(3, 64);
  fixed.note_overload(at(seconds(1)), at(seconds(1)));
  fixed.note_first_answer(milliseconds(500));
  EXPECT_EQ(fixed.get(), 3u);
}

}  // namespace
}  // namespace tensorizer::io
