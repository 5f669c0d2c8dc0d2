// Copies memory of a device to the host, through the pinned buffers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <stop_token>

#include "device/copy_engine.h"

namespace tensorizer::device {

struct HostCopy {
  std::byte* device_address;
  std::byte* to;
  uint64_t nbytes;
};

// On at most `workers` threads; the next buffer is on its way while one is copied. Throws Error:
// cancelled, device. REQUIRES: CopyEngine::order_after_caller() stands for this memory.
void fetch_to_host(std::span<const HostCopy> copies, CopyEngine& engine, unsigned workers,
                   const std::stop_token& stop);

}  // namespace tensorizer::device
