// The order in which loads that run together take their units.
#include "load/unit_order.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

namespace tensorizer::load {
namespace {

std::vector<Unit> units(size_t count, uint64_t nbytes, uint64_t first = 0, uint64_t stride = 0) {
  std::vector<Unit> made;
  for (size_t i = 0; i < count; ++i)
    made.push_back({.offset = first + i * (stride ? stride : nbytes), .nbytes = nbytes});
  return made;
}

std::string loads_of(const std::vector<NumberedUnit>& order) {
  std::string text;
  for (const NumberedUnit& unit : order) text += static_cast<char>('a' + unit.load);
  return text;
}

TEST(UnitOrder, DevicesGetTheirBytesAtTheSamePace) {
  const auto first = units(4, 100), second = units(4, 100);
  EXPECT_EQ(loads_of(order_units(std::vector<UnitsOfLoad>{{first}, {second}})), "abababab");
}

TEST(UnitOrder, APaceIsAShareOfWhatADeviceGetsInAll) {
  const auto small = units(2, 100), large = units(6, 100);
  EXPECT_EQ(loads_of(order_units(std::vector<UnitsOfLoad>{{small}, {large}})), "abbbabbb");
}

TEST(UnitOrder, AnySharesKeepTheOrderOfEachLoadAndGiveEveryUnitOnce) {
  const auto one = units(7, 3), two = units(13, 50), three = units(0, 1), four = units(1, 9999);
  const std::vector<UnitsOfLoad> loads{{one}, {two}, {three}, {four}};
  std::vector<uint32_t> next(loads.size());
  for (const NumberedUnit& unit : order_units(loads)) EXPECT_EQ(unit.unit, next[unit.load]++);
  for (size_t i = 0; i < loads.size(); ++i) EXPECT_EQ(next[i], loads[i].units.size());
}

TEST(UnitOrder, OneSourceThatWaitsIsReadInItsOrderWhateverTheDevice) {
  const int source = 0;
  const auto even = units(3, 10, 0, 20), odd = units(3, 10, 10, 20);
  EXPECT_EQ(
      loads_of(order_units(std::vector<UnitsOfLoad>{{even, &source, true}, {odd, &source, true}})),
      "ababab");
}

TEST(UnitOrder, SourcesThatWaitAreReadOneAfterAnother) {
  const int one = 0, two = 0;
  const auto some = units(3, 10), more = units(3, 10);
  EXPECT_EQ(loads_of(order_units(std::vector<UnitsOfLoad>{{some, &one, true}, {more, &two, true}})),
            "aaabbb");
}

TEST(UnitOrder, WhatIsInMemoryDoesNotWaitForTheNetwork) {
  const int one = 0;
  const auto some = units(3, 10), more = units(3, 10);
  EXPECT_EQ(loads_of(order_units(std::vector<UnitsOfLoad>{{some, &one, true}, {more}})), "bababa");
}

}  // namespace
}  // namespace tensorizer::load
