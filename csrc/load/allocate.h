// Where the tensors of a load go: which of them share memory, and whose memory on the host may be
// used again.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "device/tensor_memory.h"
#include "load/open_index.h"
#include "load/slice_plan.h"

namespace tensorizer::load {

// A tensor, or a part of one, and where it goes.
struct LoadTarget {
  uint32_t entry = 0;                // number in the index
  SliceRuns runs{};                  // of a part: within the tensor's loaded_nbytes
  device::TensorMemory destination;  // of entry.data_nbytes at least; of runs.nbytes() for a part
  bool in_place = false;             // the bytes are there already (a mapping): check, do not read
};

// Memory of the host or of a device for one tensor, or for several that share it.
struct MemoryMaker {
  // `nbytes` > 0; `zeros`: they are zero, else their content may be anything.
  std::function<device::TensorMemory(uint64_t nbytes, bool zeros)> make;
  uint64_t alignment;  // of each tensor
  // Large tensors begin where they do in a page of the file, if its elements are aligned there.
  bool as_in_file = false;
};

// Host memory for the tensors of this file. Those of plain files get memory that earlier ones have
// left, and leave theirs to later ones. What was decrypted goes back to the system with its tensor,
// which wipes it, and does not lie in memory that others get.
// A source that reads to pages without a copy gets tensors whose places let it.
MemoryMaker host_memory(const OpenedIndex& opened, const io::RangeSource& source);

// What is allocated at once: for one target, or for several that share it.
struct MemoryGroup {
  uint64_t nbytes = 0;
  bool zeros = false;
  struct Member {
    uint32_t target;
    uint64_t place, nbytes;
  };
  std::vector<Member> members;  // in their order
};

// The memory of every target that has none (in_place) and takes some, in their order, those without
// data last. A tensor, or part (`parts`: all are), of at least 8 MiB has memory of its own; smaller
// ones share at most 16 MiB, also across large ones, so a tensor that stays alive keeps at most 16
// MiB beyond its own bytes. Tensors without data share with each other: theirs is zero. Pure.
std::vector<MemoryGroup> group_memory(const OpenedIndex& opened, bool parts,
                                      const MemoryMaker& memory,
                                      std::span<const LoadTarget> targets);

// Gives the targets of a group their destinations. Throws what `memory` throws, Error(malformed)
// instead of out_of_memory for a tensor that only claims its size.
void allocate(const MemoryGroup& group, const OpenedIndex& opened, const io::RangeSource& source,
              const MemoryMaker& memory, std::span<LoadTarget> targets);

}  // namespace tensorizer::load
