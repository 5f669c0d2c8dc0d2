// What to read in which order: a pure function of the index and the selection. Whole tensors are
// planned here, parts of them in slice_plan.h; both plans have the same units and pieces.
//
// Selected records are joined to runs where the bytes between them are cheaper to read than to
// skip; runs are cut to units along file offsets, so a large tensor is many units and many small
// tensors are one. A unit is one contiguous stretch of the source, and the place of a piece in it
// is its place in any buffer that the unit is read to. Record headers are never cut; payloads of
// encrypted files are cut at cipher chunk boundaries only.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <vector>

#include "format/index.h"
#include "io/range_source.h"

namespace tensorizer::load {

// A record header, or bytes of one destination: [place, place + nbytes) of it.
struct Piece {
  enum class Kind : uint8_t { header, payload };
  Kind kind = Kind::payload;
  uint32_t target = 0;       // position in the selection; of a header that of its record
  uint32_t step = 0;         // number of this piece within a whole tensor
  uint64_t unit_offset = 0;  // from the unit's first byte
  uint64_t span_nbytes = 0;  // of the unit, in which all of it lies; more than nbytes: in runs
  uint64_t place = 0;
  uint64_t nbytes = 0;
  bool is_one_run() const noexcept { return span_nbytes == nbytes; }
};

struct Unit {
  // How the bytes of a plain unit are best read to host memory.
  enum class Read : uint8_t {
    scattered,       // by one read, each run to its place
    image,           // by one read to memory of ours, from where runs are copied
    separate_reads,  // run by run
  };
  Read read = Read::scattered;
  uint32_t first_piece = 0;
  uint32_t piece_count = 0;
  uint64_t offset = 0;  // absolute position in the source
  uint64_t nbytes = 0;
  uint64_t placed_nbytes = 0;  // of destinations
};

struct LoadPlan {
  std::vector<Piece> pieces;  // in the order of the source
  std::vector<Unit> units;    // in the order in which to take them
  // The first unit of each of options.streams, or of as many as have a record.
  std::vector<uint32_t> stream_begins;
  // Per whole tensor: payload pieces; 0: header and payload are in one unit, and hashed there.
  std::vector<uint32_t> hash_steps;
  // Units for a device are shorter than its buffers: each buffer takes as many as fit, and has room
  // for any further one while it has room for so much.
  bool units_share_buffers = false;
  uint64_t longest_unit_nbytes = 0;

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
  // Parts of about the same size that are read at the same time, each with whole records: a reader
  // in the middle of one would wait for its header and earlier bytes.
  size_t streams = 1;
  // Above 0: tensors that are cut have units of their own, and those of so many are dealt in turn.
  size_t large_at_once = 0;
  // Of so many at the begin, and slowly more: see digest::deal().
  std::optional<size_t> large_at_first;
  // Tensors that are cut have units of their own, and all are under way at once: digest::spread().
  bool spread = false;
  // A longer payload counts as a step to hash even where it is in one unit with its header.
  uint64_t whole_nbytes = std::numeric_limits<uint64_t>::max();
};

// `selection` holds entry numbers in ascending order.
LoadPlan plan_load(const format::Index& index, std::span<const uint32_t> selection,
                   const PlanOptions& options);
// Their record headers alone.
LoadPlan plan_headers(const format::Index& index, std::span<const uint32_t> selection,
                      const io::SourceTraits& traits);

}  // namespace tensorizer::load
