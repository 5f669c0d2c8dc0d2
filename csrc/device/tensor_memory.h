// The memory of a tensor's payload, which a load fills and a save reads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace tensorizer::device {

struct TensorMemory {
  // An address of the host, or of a device, where only the device's CopyEngine touches it. Host
  // memory that has an owner and is to hold plaintext of an encrypted file is private and
  // anonymous: a load that fails gives its pages back to the system instead of writing zeros to
  // them.
  std::byte* data = nullptr;
  uint64_t nbytes = 0;          // how many bytes a load may fill, or a save reads
  std::shared_ptr<void> owner;  // keeps the memory alive; null: the caller does
};

}  // namespace tensorizer::device
