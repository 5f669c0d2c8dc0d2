#include "load/load_plan.h"

#include <algorithm>

#include "core/checked_math.h"

namespace tensorizer::load {
namespace {

class Planner {
 public:
  Planner(const PlanOptions& options, LoadPlan& plan) : options_(options), plan_(plan) {}

  void add_record(uint32_t target, const format::IndexEntry& entry) {
    plan_.payload_steps.push_back(0);
    const uint64_t header_nbytes = entry.header_nbytes();
    const bool payload = options_.payloads && entry.data_nbytes > 0;
    if (header_nbytes == 0 && !payload) return;
    begin_record(entry.offset, header_nbytes);
    if (header_nbytes > 0) add({Segment::Kind::header, target, 0, entry.offset, header_nbytes, 0});
    if (payload) add_payload(target, entry);
  }

  void finish() { close_unit(); }

 private:
  // Joins the record to the open unit, with a skip over the gap, or starts a new unit.
  void begin_record(uint64_t offset, uint64_t header_nbytes) {
    if (!open_) return;
    const uint64_t gap = offset - end_;
    if (gap > options_.gap_nbytes || unit_nbytes() + gap + header_nbytes > options_.unit_nbytes) {
      close_unit();
    } else if (gap > 0) {
      add({Segment::Kind::skip, 0, 0, end_, gap, 0});
    }
  }

  void add_payload(uint32_t target, const format::IndexEntry& entry) {
    const uint64_t cut = options_.cut_nbytes;
    uint64_t done = 0;
    while (done < entry.data_nbytes) {
      const uint64_t left = entry.data_nbytes - done;
      const uint64_t room = options_.unit_nbytes - std::min(unit_nbytes(), options_.unit_nbytes);
      uint64_t step = left;
      if (left > room) {
        // Small tensors move whole to the next unit; large ones fill this one up to a legal cut.
        step = align_down(room, cut);
        if (step == 0 || left <= options_.unit_nbytes / 4) {
          if (open_ && unit_nbytes() > pending_header_nbytes_) {
            close_unit_keeping_header();
            continue;
          }
          step = std::min(left, std::max(align_down(options_.unit_nbytes, cut), cut));
        }
      }
      add({Segment::Kind::payload, target, plan_.payload_steps[target]++, entry.data_offset + done,
           step, done});
      done += step;
      if (done < entry.data_nbytes && unit_nbytes() + cut > options_.unit_nbytes) close_unit();
    }
  }

  uint64_t unit_nbytes() const noexcept { return open_ ? end_ - begin_ : 0; }

  void add(const Segment& segment) {
    if (!open_) {
      open_ = true;
      begin_ = segment.offset;
      first_ = static_cast<uint32_t>(plan_.segments.size());
      payload_nbytes_ = 0;
    }
    pending_header_nbytes_ = segment.kind == Segment::Kind::header ? segment.nbytes : 0;
    if (segment.kind == Segment::Kind::payload) payload_nbytes_ += segment.nbytes;
    plan_.segments.push_back(segment);
    end_ = segment.offset + segment.nbytes;
  }

  void close_unit() {
    if (!open_) return;
    plan_.units.push_back({first_, static_cast<uint32_t>(plan_.segments.size()) - first_, begin_,
                           end_ - begin_, payload_nbytes_});
    open_ = false;
    pending_header_nbytes_ = 0;
  }

  // A header just added belongs with its payload: it opens the next unit instead of ending this
  // one.
  void close_unit_keeping_header() {
    if (pending_header_nbytes_ == 0) {
      close_unit();
      return;
    }
    const Segment header = plan_.segments.back();
    plan_.segments.pop_back();
    end_ = header.offset;
    if (!plan_.segments.empty() && plan_.segments.back().kind == Segment::Kind::skip &&
        plan_.segments.size() > first_) {
      end_ = plan_.segments.back().offset;  // nothing follows the gap in this unit
      plan_.segments.pop_back();
    }
    if (plan_.segments.size() == first_) {
      open_ = false;
    } else {
      close_unit();
    }
    add(header);
  }

  const PlanOptions& options_;
  LoadPlan& plan_;
  bool open_ = false;
  uint64_t begin_ = 0, end_ = 0;
  uint64_t payload_nbytes_ = 0;
  uint64_t pending_header_nbytes_ = 0;  // set while the unit's last segment is a header
  uint32_t first_ = 0;
};

}  // namespace

LoadPlan plan_load(const format::Index& index, std::span<const uint32_t> selection,
                   const PlanOptions& options) {
  LoadPlan plan;
  plan.segments.reserve(selection.size() * 2);
  plan.payload_steps.reserve(selection.size());
  Planner planner(options, plan);
  for (uint32_t target = 0; target < selection.size(); ++target) {
    planner.add_record(target, index[selection[target]]);
  }
  planner.finish();
  return plan;
}

}  // namespace tensorizer::load
