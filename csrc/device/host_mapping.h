// A stretch of anonymous host memory of process-wide use, aligned for huge pages and kept from
// forked children: pinned pages must not be copied on write, and a child has no use for them. It is
// address space alone until it is faulted in, part by part. What pins the pages (a driver) is not
// known here. Confined to one thread while it is being made; then immutable.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tensorizer::device {

class HostMapping {
 public:
  HostMapping() = default;
  // Reserves `nbytes`, on `numa_node` where the system grants it (-1: anywhere). Throws
  // Error(out_of_memory).
  HostMapping(uint64_t nbytes, int numa_node);
  HostMapping(HostMapping&& other) noexcept;
  HostMapping& operator=(HostMapping&& other) noexcept;
  ~HostMapping();

  // Has pages for a part of it, so that no later access waits for them. Different parts may be
  // faulted in by different threads.
  void fault_in(uint64_t offset, uint64_t nbytes) const noexcept;

  std::byte* data() const noexcept { return data_; }
  uint64_t nbytes() const noexcept { return nbytes_; }

 private:
  std::byte* data_ = nullptr;
  uint64_t nbytes_ = 0;
};

}  // namespace tensorizer::device
