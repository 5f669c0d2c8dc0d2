// Where an entry's bytes go, or come from: an address, its size, and what keeps it alive.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace tensorizer::device {

inline constexpr int kHost = -1;

struct Destination {
  std::byte* data =
      nullptr;  // host or device address: only a CopyEngine touches what a device address points to
  uint64_t nbytes = 0;
  int device = kHost;           // CUDA ordinal, kHost for the host
  std::shared_ptr<void> owner;  // keeps the memory alive; nothing below bind/ looks inside
};

}  // namespace tensorizer::device
