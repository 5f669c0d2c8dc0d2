// Host memory for loaded tensors: anonymous pages, huge where the system offers them, faulted in by
// the thread that writes first. Immutable handle; the bytes belong to the writers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>

#include "core/pages.h"

namespace tensorizer::device {

class HostArena {
 public:
  // Zeros, which go back to the system with the arena. Throws Error(out_of_memory) naming the size.
  static std::shared_ptr<HostArena> create(uint64_t nbytes);

  // Any content: memory that tensors before these have left, where there is some (see KeptMemory);
  // and it is left to those that follow. For what is no secret.
  static std::shared_ptr<HostArena> recycle(uint64_t nbytes);

  HostArena(Pages pages, uint64_t nbytes, bool recycled) noexcept
      : pages_(std::move(pages)), nbytes_(nbytes), recycled_(recycled) {}
  ~HostArena();
  HostArena(const HostArena&) = delete;
  HostArena& operator=(const HostArena&) = delete;

  std::span<std::byte> bytes() const noexcept { return {pages_.get(), nbytes_}; }

 private:
  Pages pages_;
  uint64_t nbytes_;
  bool recycled_;
};

}  // namespace tensorizer::device
