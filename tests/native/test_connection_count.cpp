// How many requests run at the same time, in virtual time.
#include <gtest/gtest.h>

#include "io/http/http_connections.h"

namespace tensorizer::io {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

ConnectionCount::TimePoint at(milliseconds time) {
  return ConnectionCount::TimePoint(seconds(1000) + time);
}

TEST(ConnectionCount, ANearServerGetsSixteenAndOneThatIsFarAwaySixtyFour) {
  ConnectionCount count(0, 100);
  count.note_latency(milliseconds(9));
  EXPECT_EQ(count.at(at(seconds(0))), 16u);
  count.note_latency(milliseconds(10));
  EXPECT_EQ(count.at(at(seconds(0))), 64u);
  EXPECT_EQ(count.most(), 64u);
}

TEST(ConnectionCount, TheBoundHoldsForEveryNumber) {
  ConnectionCount count(0, 5);
  EXPECT_EQ(count.at(at(seconds(0))), 5u);
  EXPECT_EQ(ConnectionCount(20, 5).most(), 5u);
  count.fix(9);
  EXPECT_EQ(count.at(at(seconds(0))), 5u);
  count.fix(0);
  EXPECT_EQ(count.at(at(seconds(0))), 1u);
}

TEST(ConnectionCount, AnOverloadedServerGetsHalfAndAfterAWhileAllAgain) {
  ConnectionCount count(0, 64);
  count.note_overload(at(seconds(0)), at(milliseconds(100)));
  EXPECT_EQ(count.at(at(milliseconds(100))), 8u);
  EXPECT_EQ(count.most(), 16u);
  count.note_overload(at(milliseconds(110)), at(milliseconds(120)));
  EXPECT_EQ(count.at(at(milliseconds(120))), 4u);
  EXPECT_EQ(count.at(at(seconds(10))), 4u);
  EXPECT_EQ(count.at(at(seconds(11))), 8u);
  EXPECT_EQ(count.at(at(seconds(21))), 16u);
  EXPECT_EQ(count.at(at(seconds(60))), 16u);
}

TEST(ConnectionCount, RequestsThatBeganBeforeTheNumberChangedDoNotHalveItAgain) {
  ConnectionCount count(0, 64);
  for (int i = 0; i < 16; ++i) count.note_overload(at(milliseconds(i)), at(milliseconds(100 + i)));
  EXPECT_EQ(count.at(at(milliseconds(200))), 8u);
}

TEST(ConnectionCount, NeverGoesBelowOneAndAFixedNumberStays) {
  ConnectionCount count(0, 20);
  for (int i = 1; i < 20; ++i) count.note_overload(at(seconds(i)), at(seconds(i)));
  EXPECT_EQ(count.at(at(seconds(19))), 1u);
  ConnectionCount fixed(3, 64);
  fixed.note_overload(at(seconds(1)), at(seconds(1)));
  fixed.note_latency(milliseconds(500));
  EXPECT_EQ(fixed.at(at(seconds(1))), 3u);
}

}  // namespace
}  // namespace tensorizer::io
