// What to read in which order: a pure function of the index and the selection.
//
// Selected records are joined to runs where the bytes between them are cheaper to read than to
// skip; runs are cut to units along file offsets, so a large tensor is many units and many small
// tensors are one. Record headers are never cut; payloads of encrypted files are cut at cipher
// chunk boundaries only.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "format/index.h"

namespace tensorizer::load {

struct Segment {
  enum class Kind : uint8_t { header, payload, skip };
  Kind kind;
  uint32_t target;  // position in the selection (skip: unused)
  uint32_t step;    // payload: number of this segment within its tensor
  uint64_t offset;  // absolute position in the source
  uint64_t nbytes;
  uint64_t target_offset;  // payload: position within the tensor
};

struct Unit {
  uint32_t first_segment;
  uint32_t segment_count;
  uint64_t offset;
  uint64_t nbytes;
  uint64_t payload_nbytes;
};

struct LoadPlan {
  std::vector<Segment> segments;
  std::vector<Unit> units;
  std::vector<uint32_t> payload_steps;  // per target: payload segments
};

struct PlanOptions {
  uint64_t unit_nbytes = uint64_t{8} << 20;
  uint64_t gap_nbytes = uint64_t{64} << 10;
  uint64_t cut_nbytes =
      4096;              // payloads are cut at multiples of this, counted from their first byte
  bool payloads = true;  // false: read record headers only
};

// `selection` holds entry numbers in ascending order.
LoadPlan plan_load(const format::Index& index, std::span<const uint32_t> selection,
                   const PlanOptions& options);

}  // namespace tensorizer::load
