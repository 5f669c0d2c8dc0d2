// What a load is asked for: tensors, or parts of them, and where they go.
#pragma once

#include <cstdint>
#include <optional>

#include "device/copy_engine.h"
#include "device/tensor_memory.h"
#include "load/key_ring.h"
#include "load/slice_plan.h"

namespace tensorizer::load {

// A tensor, or a part of one, and where it goes.
struct LoadTarget {
  uint32_t entry = 0;                // number in the index
  SliceRuns runs{};                  // of a part: within the tensor's loaded_nbytes
  device::TensorMemory destination;  // of entry.data_nbytes at least; of runs.nbytes() for a part
  bool in_place = false;             // the bytes are there already (a mapping): check, do not read
};

struct LoadOptions {
  bool verify = false;                   // compare stored hashes, where there are any; no parts
  unsigned max_workers = 0;              // 0: as many as are useful
  KeyRing* keys = nullptr;               // set iff the file has crypt_info
  device::CopyEngine* engine = nullptr;  // set iff destinations are on its device
  // Targets are parts of tensors, in any order, overlapping or not. A part has no stored hash, so
  // record headers are read of encrypted files alone, for their keys and MACs.
  bool parts = false;
  // Bytes between two ranges of parts that are read rather than skipped; nullopt: as the source
  // likes it.
  std::optional<uint64_t> gap_nbytes{};
};

}  // namespace tensorizer::load
