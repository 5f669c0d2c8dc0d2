// The memory of a tensor's payload, which a load fills and a save reads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace tensorizer::device {

struct TensorMemory {
  // An address of the host, or of a device, which the host does not touch: the device's CopyEngine
  // does. A load of an encrypted file that fails wipes it. Where there is an owner, it does so by
  // giving the pages back to the system, so they must be private and anonymous.
  std::byte* data = nullptr;
  uint64_t nbytes = 0;          // how many bytes a load may fill, or a save reads
  std::shared_ptr<void> owner;  // keeps the memory alive; null: the caller does
};

}  // namespace tensorizer::device
