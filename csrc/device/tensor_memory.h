// The memory of a tensor's payload, which a load fills and a save reads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace tensorizer::device {

struct TensorMemory {
  // Of the host, private and anonymous where it is to be filled with what may have to be wiped; or
  // of a device, which only its CopyEngine touches.
  std::byte* data = nullptr;
  uint64_t nbytes = 0;          // that may be filled, or are to be read
  std::shared_ptr<void> owner;  // keeps the memory alive; null: the caller does
};

}  // namespace tensorizer::device
