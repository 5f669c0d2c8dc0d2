#include "load/slice_worker.h"

#include <algorithm>
#include <cstring>

#include "core/stop.h"
#include "crypto/secret_buffer.h"

namespace tensorizer::load {
namespace {

// Runs below this are copied out of a buffer; longer ones are read straight to their destination.
constexpr uint64_t kLongRunNbytes = 512;

class SliceWorker final : public UnitWorker {
 public:
  SliceWorker(const SliceWork& work, const std::stop_token& stop)
      : work_(work), job_(work.job), stop_(stop) {
    if (job_.options.engine != nullptr)
      lane_ = job_.options.engine->make_lane(work_.cipher != nullptr);
  }

  void prepare() override {
    if (lane_) take_buffer();
  }

  void process(size_t number) override {
    const SliceUnit& unit = work_.plan.units[number];
    const std::span<const SliceSegment> segments = work_.plan.segments_of(unit);
    if (work_.cipher != nullptr) {
      open_chunks(unit, segments);
    } else {
      give_places(segments);
      if (unit.apart) {
        read_apart(segments.front());
      } else if (unit.in_order && has_long_runs(segments)) {
        read_scattered(unit, segments);
      } else {
        read_and_copy(unit, segments);
      }
    }
    send();
    job_.nbytes_done.fetch_add(unit.placed_nbytes, std::memory_order_relaxed);
  }

  void finish() override {
    if (lane_) lane_->finish(stop_);
  }

 private:
  const SlicePart& part_of(const SliceSegment& segment) const { return work_.parts[segment.part]; }
  std::byte* destination_of(const SliceSegment& segment) const {
    return work_.targets[segment.part].destination.data + segment.place;
  }

  void take_buffer() {
    buffer_ = device::next_buffer(*lane_, stop_, [] {});
    used_ = 0;
  }

  // Where each segment's bytes come together: at their destination on the host, behind each other
  // in the lane's buffer, from where they are sent.
  void give_places(std::span<const SliceSegment> segments) {
    places_.clear();
    for (const SliceSegment& segment : segments) {
      std::byte* const to = destination_of(segment);
      places_.push_back(lane_ ? buffer_.data() + used_ : to);
      if (!lane_) continue;
      copies_.push_back({used_, to, segment.nbytes});
      used_ += segment.nbytes;
    }
  }

  void send() {
    if (!copies_.empty()) lane_->send(copies_, stop_);
    copies_.clear();
  }

  // --- not encrypted ---

  bool has_long_runs(std::span<const SliceSegment> segments) const {
    return std::all_of(segments.begin(), segments.end(), [&](const SliceSegment& segment) {
      return part_of(segment).runs.run_nbytes >= kLongRunNbytes ||
             segment.end - segment.begin == segment.nbytes;
    });
  }

  void read_apart(const SliceSegment& segment) {
    std::byte* const to = places_.front();
    const SlicePart& part = part_of(segment);
    for_each_run(part.runs, segment.place, segment.nbytes,
                 [&](uint64_t offset, uint64_t place, uint64_t nbytes) {
                   const io::Slice into(to + (place - segment.place), nbytes);
                   job_.source.read_at(part.payload + offset, into, stop_);
                 });
  }

  // One read, each run to its place, and what lies between them to a place that nobody looks at.
  void read_scattered(const SliceUnit& unit, std::span<const SliceSegment> segments) {
    uint64_t end = unit.offset, gap = 0;
    for (const SliceSegment& segment : segments) {
      for_each_run(part_of(segment).runs, segment.place, segment.nbytes,
                   [&](uint64_t offset, uint64_t, uint64_t nbytes) {
                     const uint64_t begin = part_of(segment).payload + offset;
                     gap = std::max(gap, begin - end);
                     end = begin + nbytes;
                   });
    }
    if (image_.size() < gap) image_.resize(gap);
    slices_.clear();
    end = unit.offset;
    for (size_t i = 0; i < segments.size(); ++i) {
      const SliceSegment& segment = segments[i];
      for_each_run(part_of(segment).runs, segment.place, segment.nbytes,
                   [&](uint64_t offset, uint64_t place, uint64_t nbytes) {
                     const uint64_t begin = part_of(segment).payload + offset;
                     if (begin > end) slices_.emplace_back(image_.data(), begin - end);
                     slices_.emplace_back(places_[i] + (place - segment.place), nbytes);
                     end = begin + nbytes;
                   });
    }
    job_.source.read_at(unit.offset, slices_, stop_);
  }

  void read_and_copy(const SliceUnit& unit, std::span<const SliceSegment> segments) {
    const std::byte* const image = image_of(unit);
    for (size_t i = 0; i < segments.size(); ++i)
      copy_runs(segments[i], image, unit.offset, places_[i]);
  }

  void copy_runs(const SliceSegment& segment, const std::byte* image, uint64_t image_at,
                 std::byte* to) const {
    const SlicePart& part = part_of(segment);
    const std::byte* const payload = image + (part.payload - image_at);  // modulo 2^64
    for_each_run(part.runs, segment.place, segment.nbytes,
                 [&](uint64_t offset, uint64_t place, uint64_t nbytes) {
                   std::memcpy(to + (place - segment.place), payload + offset, nbytes);
                 });
  }

  const std::byte* image_of(const SliceUnit& unit) {
    if (const std::byte* there = job_.source.view(unit.offset, unit.nbytes)) return there;
    if (image_.size() < unit.nbytes) image_.resize(unit.nbytes);
    const io::Slice into = std::span(image_).first(unit.nbytes);
    job_.source.read_at(unit.offset, into, stop_);
    return into.data();
  }

  // --- encrypted ---

  // Opens every chunk of the unit. Those that are wanted whole, by one part, are opened to where
  // they go; the others to memory of ours, from where what is wanted of them is copied.
  void open_chunks(const SliceUnit& unit, std::span<const SliceSegment> segments) {
    const SlicePart& part = part_of(segments.front());
    const std::byte* const image = image_of(unit);
    if (plain_.size() < unit.nbytes) plain_ = crypto::SecretBuffer(unit.nbytes);
    const SliceSegment& first = segments.front();
    const bool straight = !lane_ && segments.size() == 1 && first.end - first.begin == first.nbytes;
    for (uint64_t begin = unit.offset; begin < unit.offset + unit.nbytes;) {
      const uint64_t end = std::min(begin + part.chunk_nbytes, unit.offset + unit.nbytes);
      const bool in_place = straight && first.begin <= begin && end <= first.end;
      std::byte* const to = in_place ? destination_of(first) + (begin - first.begin)
                                     : plain_.data() + (begin - unit.offset);
      job_.naming(part.record, [&] {
        work_.cipher->open(part.record, begin - part.payload,
                           {image + (begin - unit.offset), end - begin}, to, stop_);
      });
      if (straight && !in_place) {
        const uint64_t from = std::max(begin, first.begin), until = std::min(end, first.end);
        std::memcpy(destination_of(first) + (from - first.begin),
                    plain_.data() + (from - unit.offset), until - from);
      }
      begin = end;
    }
    if (straight) return;
    for (const SliceSegment& segment : segments) {
      if (lane_) {
        pack(segment, unit.offset);
      } else {
        copy_runs(segment, plain_.data(), unit.offset, destination_of(segment));
      }
    }
  }

  // To buffers of the lane: a chunk may be longer than one of them.
  void pack(const SliceSegment& segment, uint64_t image_at) {
    for (uint64_t done = 0; done < segment.nbytes;) {
      if (used_ == buffer_.size()) {
        send();
        take_buffer();
      }
      SliceSegment some = segment;
      some.place += done;
      some.nbytes = std::min<uint64_t>(segment.nbytes - done, buffer_.size() - used_);
      copy_runs(some, plain_.data(), image_at, buffer_.data() + used_);
      copies_.push_back({used_, destination_of(some), some.nbytes});
      used_ += some.nbytes;
      done += some.nbytes;
    }
  }

  const SliceWork work_;
  LoadJob& job_;
  const std::stop_token stop_;
  std::unique_ptr<device::Lane> lane_;  // set iff bound for a device
  std::span<std::byte> buffer_;         // of the lane, for the unit at hand
  uint64_t used_ = 0;                   // of the buffer
  std::vector<std::byte*> places_;      // of the unit's segments
  std::vector<io::Slice> slices_;
  std::vector<std::byte> image_;  // as in the source
  crypto::SecretBuffer plain_;    // opened
  std::vector<device::CopyPiece> copies_;
};

}  // namespace

std::unique_ptr<UnitWorker> make_slice_worker(const SliceWork& work, const std::stop_token& stop) {
  return std::make_unique<SliceWorker>(work, stop);
}

}  // namespace tensorizer::load
