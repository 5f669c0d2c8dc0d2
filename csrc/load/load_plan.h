// What to read in which order: a pure function of the index and the selection.
//
// Selected records are joined to runs where the bytes between them are cheaper to read than to
// skip; runs are cut to units along file offsets, so a large tensor is many units and many small
// tensors are one. A unit is one contiguous stretch of the source, and the place of a piece in it
// is its place in any buffer that the unit is read to. Record headers are never cut; payloads of
// encrypted files are cut at cipher chunk boundaries only.
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "format/index.h"

namespace tensorizer::load {

struct Piece {
  enum class Kind : uint8_t { header, payload };
  Kind kind;
  uint32_t target;         // position in the selection
  uint32_t step;           // payload: number of this piece within its tensor
  uint64_t unit_offset;    // from the unit's first byte
  uint64_t target_offset;  // payload: from the tensor's first byte
  uint64_t nbytes;
};

struct Unit {
  uint32_t first_piece;
  uint32_t piece_count;
  uint64_t offset;  // absolute position in the source
  uint64_t nbytes;
  uint64_t payload_nbytes;
};

struct LoadPlan {
  std::vector<Piece> pieces;  // in the order of the source
  std::vector<Unit> units;    // in the order in which to take them
  // Per target: payload pieces; 0: header and payload are in one unit, and hashed there.
  std::vector<uint32_t> hash_steps;

  std::span<const Piece> pieces_of(const Unit& unit) const noexcept {
    return std::span(pieces).subspan(unit.first_piece, unit.piece_count);
  }
};

struct PlanOptions {
  uint64_t unit_nbytes = uint64_t{8} << 20;
  uint64_t gap_nbytes = uint64_t{64} << 10;
  uint64_t cut_nbytes =
      4096;              // payloads are cut at multiples of this, counted from their first byte
  bool payloads = true;  // false: read record headers only
  // No unit with payload in it is longer, whatever the headers take; at least unit_nbytes and
  // cut_nbytes.
  uint64_t buffer_nbytes = std::numeric_limits<uint64_t>::max();
  // Above 0: tensors that are cut have units of their own, and those of so many are dealt in turn.
  size_t large_at_once = 0;
  // A longer payload counts as a step to hash even where it is in one unit with its header.
  uint64_t whole_nbytes = std::numeric_limits<uint64_t>::max();
};

// `selection` holds entry numbers in ascending order.
LoadPlan plan_load(const format::Index& index, std::span<const uint32_t> selection,
                   const PlanOptions& options);

}  // namespace tensorizer::load
