// What a device makes of a tensor's elements on their way to its destination.
#pragma once

#include <cstdint>

#include "device/chunk_to_open.h"

namespace tensorizer::load {

struct Conversion {
  device::ElementType from;
  device::ElementType to;

  static constexpr uint64_t nbytes_of(device::ElementType type) noexcept {
    return type == device::kFloat64 ? 8 : type == device::kFloat32 ? 4 : 2;
  }
  // Whole elements in `nbytes` as they are stored.
  constexpr uint64_t count(uint64_t nbytes) const noexcept { return nbytes / nbytes_of(from); }
  // The bytes that they take at the destination.
  constexpr uint64_t converted(uint64_t nbytes) const noexcept {
    return count(nbytes) * nbytes_of(to);
  }
};

}  // namespace tensorizer::load
