#include "load/slice_plan.h"

#include "core/checked_math.h"
#include "core/pages.h"

namespace tensorizer::load {
namespace {

// Two parts below this are worth a longer stretch of unwanted bytes than a request of their own.
constexpr uint64_t kSmallNbytes = uint64_t{64} << 10;
constexpr uint64_t kWasteShare = 32;  // elsewhere at most 1/32 of what is wanted is read in vain
// Runs below this are copied out of a buffer; longer ones are read straight to their destination.
constexpr uint64_t kLongRunNbytes = 512;

// Bytes of one part, all of which lie in [begin, end) of the source.
struct Segment {
  uint32_t part = 0;
  bool separate_reads = false;  // its runs are too far from each other to be read together
  uint64_t begin = 0, end = 0;
  uint64_t place = 0, nbytes = 0;
};

// Cuts one part to segments.
class Cutter {
 public:
  Cutter(uint32_t number, const SlicePart& part, const SlicePlanOptions& options,
         std::vector<Segment>& segments)
      : part_(part), options_(options), segments_(segments) {
    segment_.part = number;
    // What lies between runs has to be opened where it belongs to a chunk that is wanted.
    gap_nbytes_ = std::max(options.run_gap_nbytes, part.chunk_nbytes);
    if (part.chunk_nbytes > 0)
      cell_nbytes_ =
          part.chunk_nbytes * std::max<uint64_t>(1, options.unit_nbytes / part.chunk_nbytes);
  }

  void run() {
    if (part_.runs.nbytes() == 0) return;
    add_loops(0, part_.payload + part_.runs.offset);
    close();
  }

 private:
  void add_loops(size_t depth, uint64_t at) {
    const std::vector<SliceLoop>& loops = part_.runs.loops;
    if (loops.empty()) return add_runs(at, 1, part_.runs.run_nbytes);
    const SliceLoop& loop = loops[depth];
    if (depth + 1 == loops.size()) return add_runs(at, loop.count, loop.stride_nbytes);
    for (uint64_t i = 0; i < loop.count; ++i) add_loops(depth + 1, at + i * loop.stride_nbytes);
  }

  // `count` runs, the first at `at`, `stride` bytes from one begin to the next.
  void add_runs(uint64_t at, uint64_t count, uint64_t stride) {
    const uint64_t run = part_.runs.run_nbytes;
    const bool far = count > 1 && stride - run > gap_nbytes_;
    if (far && cell_nbytes_ == 0 && run <= options_.unit_nbytes)
      return add_separate(at, count, stride);
    while (count > 0) {
      if (open_ && (at - segment_.end > gap_nbytes_ || at >= limit_)) close();
      if (!open_) open(at);
      const uint64_t room = limit_ - at;
      const uint64_t fitting =
          room < run ? 0 : (far ? 1 : std::min(count, (room - run) / stride + 1));
      if (fitting > 0) {
        extend(at + (fitting - 1) * stride + run, fitting * run);
        at += fitting * stride;
        count -= fitting;
        continue;
      }
      add_cut(at);
      at += stride;
      --count;
    }
  }

  // One run that does not fit whole.
  void add_cut(uint64_t at) {
    uint64_t left = part_.runs.run_nbytes;
    if (cell_nbytes_ == 0 && left <= options_.unit_nbytes && segment_.nbytes > 0) {
      close();
      open(at);
    }
    while (left > 0) {
      if (at >= limit_) {
        close();
        open(at);
      }
      const uint64_t n = std::min(left, limit_ - at);
      extend(at + n, n);
      at += n;
      left -= n;
    }
  }

  void add_separate(uint64_t at, uint64_t count, uint64_t stride) {
    close();
    const uint64_t run = part_.runs.run_nbytes;
    const uint64_t most =
        std::clamp<uint64_t>(options_.unit_nbytes / run, 1, options_.runs_at_once);
    while (count > 0) {
      const uint64_t n = std::min(count, most);
      open(at);
      segment_.separate_reads = n > 1;
      extend(at + (n - 1) * stride + run, n * run);
      close();
      at += n * stride;
      count -= n;
    }
  }

  void open(uint64_t at) {
    open_ = true;
    segment_.begin = segment_.end = at;
    segment_.place = place_;
    segment_.nbytes = 0;
    segment_.separate_reads = false;
    limit_ = cell_nbytes_ == 0
                 ? at + options_.unit_nbytes
                 : part_.payload + align_down(at - part_.payload, cell_nbytes_) + cell_nbytes_;
  }

  void extend(uint64_t end, uint64_t nbytes) {
    segment_.end = end;
    segment_.nbytes += nbytes;
    place_ += nbytes;
  }

  void close() {
    if (open_ && segment_.nbytes > 0) segments_.push_back(segment_);
    open_ = false;
  }

  const SlicePart& part_;
  const SlicePlanOptions& options_;
  std::vector<Segment>& segments_;
  Segment segment_;
  uint64_t gap_nbytes_ = 0;
  uint64_t cell_nbytes_ = 0;  // encrypted: no segment crosses a multiple of it; 0: not encrypted
  uint64_t limit_ = 0;        // of the open segment
  uint64_t place_ = 0;
  bool open_ = false;
};

// Joins segments, in the order of the source, to units.
class Joiner {
 public:
  Joiner(std::span<const SlicePart> parts, const SlicePlanOptions& options, LoadPlan& plan)
      : parts_(parts), options_(options), plan_(plan) {}

  void run(std::span<const Segment> segments) {
    plan_.pieces.reserve(segments.size());
    for (const Segment& segment : segments) {
      const SlicePart& part = parts_[segment.part];
      uint64_t begin = segment.begin, end = segment.end;
      if (part.chunk_nbytes > 0) {
        begin = part.payload + align_down(begin - part.payload, part.chunk_nbytes);
        end = part.payload +
              std::min(align_up(end - part.payload, part.chunk_nbytes), part.payload_nbytes);
      }
      if (!joins(segment, part, begin, end)) start(segment, begin);
      add(segment, end);
    }
  }

 private:
  bool joins(const Segment& segment, const SlicePart& part, uint64_t begin, uint64_t end) const {
    if (plan_.units.empty() || segment.separate_reads) return false;
    const Unit& unit = plan_.units.back();
    if (unit.read == Unit::Read::separate_reads ||
        unit.placed_nbytes + segment.nbytes > options_.unit_nbytes)
      return false;
    const uint64_t unit_end = unit.offset + unit.nbytes;
    if (part.chunk_nbytes > 0 && parts_[last_part_].record != part.record) return false;
    const uint64_t most = std::max(options_.unit_nbytes, part.chunk_nbytes);
    if (std::max(end, unit_end) - unit.offset > most) return false;
    return begin <= unit_end || is_worth(begin - unit_end, unit.placed_nbytes, segment.nbytes);
  }

  bool is_worth(uint64_t gap, uint64_t before, uint64_t after) const noexcept {
    if (gap > options_.part_gap_nbytes) return false;
    if (gap <= kPageNbytes) return true;
    return gap <= (before + after) / kWasteShare || (before < kSmallNbytes && after < kSmallNbytes);
  }

  void start(const Segment& segment, uint64_t begin) {
    plan_.units.push_back(
        {.read = segment.separate_reads ? Unit::Read::separate_reads : Unit::Read::scattered,
         .first_piece = static_cast<uint32_t>(plan_.pieces.size()),
         .offset = begin});
    last_end_ = begin;
  }

  void add(const Segment& segment, uint64_t end) {
    Unit& unit = plan_.units.back();
    const Piece piece{.target = segment.part,
                      .unit_offset = segment.begin - unit.offset,
                      .span_nbytes = segment.end - segment.begin,
                      .place = segment.place,
                      .nbytes = segment.nbytes};
    const bool long_runs =
        piece.is_one_run() || parts_[segment.part].runs.run_nbytes >= kLongRunNbytes;
    // One read cannot give a byte to two places.
    if (unit.read == Unit::Read::scattered && (segment.begin < last_end_ || !long_runs))
      unit.read = Unit::Read::image;
    ++unit.piece_count;
    unit.nbytes = std::max(unit.offset + unit.nbytes, end) - unit.offset;
    unit.placed_nbytes += segment.nbytes;
    last_end_ = std::max(last_end_, segment.end);
    last_part_ = segment.part;
    plan_.pieces.push_back(piece);
  }

  const std::span<const SlicePart> parts_;
  const SlicePlanOptions& options_;
  LoadPlan& plan_;
  uint64_t last_end_ = 0;  // of the open unit's segments
  uint32_t last_part_ = 0;
};

}  // namespace

SliceRuns runs_of(std::span<const uint64_t> shape, uint32_t itemsize,
                  std::span<const SliceDim> box) {
  SliceRuns runs;
  runs.run_nbytes = itemsize;
  uint64_t element = itemsize;  // bytes from one element of the dimension to the next
  for (size_t d = shape.size(); d-- > 0;) {
    const SliceDim& taken = box[d];
    if (taken.count == 0) return {};
    runs.offset += taken.start * element;
    if (taken.count > 1) {
      const uint64_t stride_nbytes = taken.stride * element;
      if (stride_nbytes == runs.run_nbytes && runs.loops.empty()) {
        runs.run_nbytes *= taken.count;
      } else if (!runs.loops.empty() &&
                 stride_nbytes == runs.loops.back().count * runs.loops.back().stride_nbytes) {
        runs.loops.back().count *= taken.count;
      } else {
        runs.loops.push_back({taken.count, stride_nbytes});
      }
    }
    element *= shape[d];
  }
  std::reverse(runs.loops.begin(), runs.loops.end());
  return runs;
}

LoadPlan plan_slices(std::span<const SlicePart> parts, const SlicePlanOptions& options) {
  std::vector<Segment> segments;
  segments.reserve(parts.size());
  for (uint32_t i = 0; i < parts.size(); ++i) Cutter(i, parts[i], options, segments).run();
  std::stable_sort(segments.begin(), segments.end(),
                   [](const Segment& a, const Segment& b) { return a.begin < b.begin; });
  LoadPlan plan;
  Joiner(parts, options, plan).run(segments);
  return plan;
}

}  // namespace tensorizer::load
