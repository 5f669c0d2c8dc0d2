#include "load/load_plan.h"

#include <algorithm>

#include "core/checked_math.h"
#include "digest/deal.h"

namespace tensorizer::load {
namespace {

// Record headers that are closer than this are read together.
constexpr uint64_t kHeaderGapNbytes = 4096;

class Planner {
 public:
  Planner(const PlanOptions& options, uint64_t total_nbytes, LoadPlan& plan)
      : options_(options), total_nbytes_(total_nbytes), plan_(plan) {}

  void add_record(uint32_t target, const format::IndexEntry& entry) {
    const uint64_t payload = options_.payloads ? entry.data_nbytes : 0;
    plan_.hash_steps.push_back(0);
    if (entry.header_nbytes() == 0 && payload == 0) return;  // a container without record headers
    if (begins_stream(payload)) {
      close();
      plan_.stream_begins.push_back(static_cast<uint32_t>(plan_.units.size()));
    }
    if (open_ && !joins(entry, payload)) close();
    planned_nbytes_ += payload;
    if (entry.header_nbytes() > 0)
      add({.kind = Piece::Kind::header, .target = target, .nbytes = entry.header_nbytes()},
          entry.offset);
    const bool in_one_unit = add_payload(target, entry.data_offset, payload);
    if (in_one_unit && payload <= options_.whole_nbytes) plan_.hash_steps[target] = 0;
    if (!in_one_unit && deals()) close();
  }

  void close() {
    if (!open_) return;
    plan_.units.push_back({.first_piece = first_,
                           .piece_count = static_cast<uint32_t>(plan_.pieces.size()) - first_,
                           .offset = begin_,
                           .nbytes = end_ - begin_,
                           .placed_nbytes = placed_nbytes_});
    open_ = false;
  }

 private:
  // At the record whose begin is nearest to an even share.
  bool begins_stream(uint64_t payload) const noexcept {
    const size_t begun = plan_.stream_begins.size();
    return begun < options_.streams &&
           planned_nbytes_ + payload / 2 >= total_nbytes_ / options_.streams * begun;
  }
  bool deals() const noexcept { return options_.spread || options_.large_at_once > 0; }
  uint64_t unit_nbytes() const noexcept { return open_ ? end_ - begin_ : 0; }

  // Whether the record goes on with the open unit. What is small moves whole to the next unit; what
  // is large fills this one, up to a legal cut.
  bool joins(const format::IndexEntry& entry, uint64_t payload) const noexcept {
    const uint64_t gap = entry.offset - end_;
    if (gap > options_.gap_nbytes) return false;
    const uint64_t before = unit_nbytes() + gap + entry.header_nbytes();
    if (before > options_.unit_nbytes) return false;
    if (payload <= options_.unit_nbytes - before) return true;
    return !deals() && payload > options_.unit_nbytes / 4 &&
           options_.cut_nbytes <= options_.unit_nbytes - before;
  }

  // True when all of the record is in one unit.
  bool add_payload(uint32_t target, uint64_t offset, uint64_t nbytes) {
    const uint64_t first_unit = plan_.units.size();
    for (uint64_t done = 0; done < nbytes;) {
      const uint64_t step = next_step(nbytes - done);
      if (step == 0) {
        close();  // the header alone
        continue;
      }
      const uint32_t number = plan_.hash_steps[target]++;
      add({.target = target, .step = number, .place = done, .nbytes = step}, offset + done);
      done += step;
      if (done < nbytes) close();
    }
    return plan_.units.size() == first_unit;
  }

  // How much of what is left goes to the open unit; 0: nothing fits beside what is there.
  uint64_t next_step(uint64_t left) const noexcept {
    const uint64_t room = options_.unit_nbytes - std::min(unit_nbytes(), options_.unit_nbytes);
    if (left <= room) return left;
    const uint64_t step = align_down(room, options_.cut_nbytes);
    if (step > 0) return step;
    // A header that leaves no room for a piece takes one along nevertheless, if it may.
    const uint64_t least = std::min(
        left, std::max(align_down(options_.unit_nbytes, options_.cut_nbytes), options_.cut_nbytes));
    return least <= options_.buffer_nbytes - std::min(unit_nbytes(), options_.buffer_nbytes) ||
                   !open_
               ? least
               : 0;
  }

  void add(Piece piece, uint64_t offset) {
    if (!open_) {
      open_ = true;
      begin_ = offset;
      first_ = static_cast<uint32_t>(plan_.pieces.size());
      placed_nbytes_ = 0;
    }
    if (piece.kind == Piece::Kind::payload) placed_nbytes_ += piece.nbytes;
    piece.unit_offset = offset - begin_;
    piece.span_nbytes = piece.nbytes;
    plan_.pieces.push_back(piece);
    end_ = offset + piece.nbytes;
  }

  const PlanOptions& options_;
  const uint64_t total_nbytes_;  // of payloads
  LoadPlan& plan_;
  uint64_t planned_nbytes_ = 0;
  bool open_ = false;
  uint64_t begin_ = 0, end_ = 0;
  uint64_t placed_nbytes_ = 0;
  uint32_t first_ = 0;
};

}  // namespace

LoadPlan plan_load(const format::Index& index, std::span<const uint32_t> selection,
                   const PlanOptions& options) {
  LoadPlan plan;
  plan.pieces.reserve(selection.size() * 2);
  plan.hash_steps.reserve(selection.size());
  uint64_t total_nbytes = 0;
  if (options.streams > 1)
    for (const uint32_t entry : selection) total_nbytes += index[entry].data_nbytes;
  Planner planner(options, total_nbytes, plan);
  for (uint32_t target = 0; target < selection.size(); ++target)
    planner.add_record(target, index[selection[target]]);
  planner.close();
  for (const Unit& unit : plan.units)
    plan.longest_unit_nbytes = std::max(plan.longest_unit_nbytes, unit.nbytes);
  if (options.spread || options.large_at_once > 0) {
    const auto record_of = [&](const Unit& unit) {
      const uint32_t target = plan.pieces[unit.first_piece].target;
      return plan.hash_steps[target] > 0 ? target : digest::kNoRecord;
    };
    const std::vector<uint32_t> records = digest::records_of(plan.units, record_of);
    digest::put_in_order(
        plan.units, options.spread
                        ? digest::spread(records)
                        : digest::deal(records, options.large_at_once,
                                       options.large_at_first.value_or(options.large_at_once)));
  }
  return plan;
}

LoadPlan plan_headers(const format::Index& index, std::span<const uint32_t> selection,
                      const io::SourceTraits& traits) {
  return plan_load(index, selection,
                   {.unit_nbytes = traits.unit_nbytes,
                    .gap_nbytes = std::min(kHeaderGapNbytes, traits.gap_nbytes),
                    .payloads = false});
}

}  // namespace tensorizer::load
