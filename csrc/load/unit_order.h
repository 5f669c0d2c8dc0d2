// The order in which the units of several loads that run together are taken. Pure.
//
// What is answered at once goes to all its devices at the same pace, so that each has copies to do
// all the time. What waits for another machine is read in the order of the source, one source after
// another, as alone: its connections are what limits it.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "load/load_plan.h"

namespace tensorizer::load {

struct UnitsOfLoad {
  std::span<const Unit> units;
  const void* source = nullptr;
  bool remote = false;
};

struct NumberedUnit {
  uint32_t load;
  uint32_t unit;
};

// Units of one load stay in their order.
std::vector<NumberedUnit> order_units(std::span<const UnitsOfLoad> loads);

}  // namespace tensorizer::load
