// Host memory for loaded tensors: anonymous pages, huge where the system offers them, faulted in by
// whoever writes first and zero until then. Immutable handle; the bytes belong to the writers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

namespace tensorizer::device {

class HostArena {
 public:
  // Throws Error(out_of_memory) naming the size.
  static std::shared_ptr<HostArena> create(uint64_t nbytes);
  ~HostArena();
  HostArena(const HostArena&) = delete;
  HostArena& operator=(const HostArena&) = delete;

  std::span<std::byte> bytes() const noexcept { return {data_, nbytes_}; }

 private:
  HostArena(std::byte* data, uint64_t nbytes, uint64_t mapped) noexcept
      : data_(data), nbytes_(nbytes), mapped_(mapped) {}

  std::byte* data_;
  uint64_t nbytes_;
  uint64_t mapped_;
};

}  // namespace tensorizer::device
