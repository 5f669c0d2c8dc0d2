// Parts of tensors as byte ranges, and which of them to read together: a pure function of the parts
// and of how the source likes to be read.
//
// A part is a box of one tensor, taken in C order: runs of consecutive bytes inside nested loops.
// It is written to a contiguous destination, so that the place of a byte there gives the run that
// it belongs to; no list of runs exists, however many there are.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "load/load_plan.h"

namespace tensorizer::load {

// What is taken of one dimension: `count` elements from `start` on, every `stride`-th. `stride`
// >= 1.
struct SliceDim {
  uint64_t start = 0;
  uint64_t count = 0;
  uint64_t stride = 1;
};

// A loop around runs: `count` times, `stride_nbytes` from one begin to the next.
struct SliceLoop {
  uint64_t count = 0;
  uint64_t stride_nbytes = 0;
};

struct SliceRuns {
  uint64_t offset = 0;           // of the first run, from the payload's first byte
  uint64_t run_nbytes = 0;       // of each run; 0: the part is empty
  std::vector<SliceLoop> loops;  // outermost first; none: one run

  uint64_t nbytes() const noexcept {
    uint64_t total = run_nbytes;
    for (const SliceLoop& loop : loops) total *= loop.count;
    return total;
  }
};

// The runs of a box; as few and as long ones as there can be. REQUIRES: one SliceDim per dimension,
// within it, and a tensor of less than 2^64 bytes.
SliceRuns runs_of(std::span<const uint64_t> shape, uint32_t itemsize,
                  std::span<const SliceDim> box);

// Calls fn(offset, place, nbytes) for the runs of [place, place + nbytes) of the destination, in
// order: `offset` from the payload's first byte, `place` in the destination.
template <class Fn>
void for_each_run(const SliceRuns& runs, uint64_t place, uint64_t nbytes, Fn&& fn) {
  if (nbytes == 0) return;
  uint64_t skip = place % runs.run_nbytes;
  uint64_t number = place / runs.run_nbytes;
  const size_t depth = runs.loops.size();
  uint64_t few[8];
  std::vector<uint64_t> many(depth > 8 ? depth : 0);
  uint64_t* const at = depth > 8 ? many.data() : few;
  uint64_t offset = runs.offset;
  for (size_t i = depth; i-- > 0;) {
    at[i] = number % runs.loops[i].count;
    number /= runs.loops[i].count;
    offset += at[i] * runs.loops[i].stride_nbytes;
  }
  for (;;) {
    const uint64_t n = std::min(runs.run_nbytes - skip, nbytes);
    fn(offset + skip, place, n);
    nbytes -= n;
    if (nbytes == 0) return;
    place += n;
    skip = 0;
    for (size_t i = depth; i-- > 0;) {
      offset += runs.loops[i].stride_nbytes;
      if (++at[i] < runs.loops[i].count) break;
      offset -= runs.loops[i].count * runs.loops[i].stride_nbytes;
      at[i] = 0;
    }
  }
}

// One part as the planner sees it.
struct SlicePart {
  uint32_t record = 0;          // parts of one record have the same number
  uint64_t payload = 0;         // position of the record's payload in the source
  uint64_t payload_nbytes = 0;  // of the whole payload
  uint64_t chunk_nbytes = 0;    // of its cipher; 0: not encrypted
  SliceRuns runs;
};

struct SlicePlanOptions {
  uint64_t unit_nbytes = uint64_t{8} << 20;  // most bytes of a unit, read or placed
  uint64_t run_gap_nbytes = 256;             // runs of a part that are closer are read together
  uint64_t part_gap_nbytes = 4096;  // parts that are closer are, if that reads little in vain
  uint64_t runs_at_once = 256;      // runs that are read one by one: so many make a unit
};

// Parts may overlap and come in any order; units are in the order of the source. A unit with chunks
// of a cipher holds whole ones, of one record.
LoadPlan plan_slices(std::span<const SlicePart> parts, const SlicePlanOptions& options);

}  // namespace tensorizer::load
