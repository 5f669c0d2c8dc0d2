// Anonymous host memory of process-wide use, page-aligned, faulted in by several threads and kept
// from forked children: pinned pages must not be copied on write, and a child has no use for them.
// What pins the pages (a driver) is not known here. Confined to one thread while it is being made;
// then immutable.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tensorizer::device {

class HostMapping {
 public:
  HostMapping() = default;
  // Maps `nbytes`, on `numa_node` where the system grants it (-1: anywhere), and faults it in with
  // up to `threads` threads. Throws Error(out_of_memory).
  HostMapping(uint64_t nbytes, int numa_node, unsigned threads);
  HostMapping(HostMapping&& other) noexcept;
  HostMapping& operator=(HostMapping&& other) noexcept;
  ~HostMapping();

  std::byte* data() const noexcept { return data_; }
  uint64_t nbytes() const noexcept { return nbytes_; }

 private:
  std::byte* data_ = nullptr;
  uint64_t nbytes_ = 0;
};

}  // namespace tensorizer::device
