#include "load/host_load.h"

#include <algorithm>

namespace tensorizer::load {
namespace {

class HostLoad final : public UnitWorker {
 public:
  HostLoad(LoadJob& job, const std::stop_token& stop) : job_(job), stop_(stop) {}

  bool help() override { return job_.digester && job_.digester->help(); }

  void process(size_t number) override {
    const Unit& unit = job_.plan.units[number];
    job_.in_order(number, stop_, [&] { read(unit); });
    std::byte* header_at = headers_.data();
    for (const Piece& piece : job_.plan.pieces_of(unit)) {
      if (piece.kind == Piece::Kind::header) {
        accept_header(piece, {header_at, piece.nbytes});
        header_at += piece.nbytes;
      } else if (job_.digester) {
        digest(piece);
      }
    }
    if (job_.digester) job_.digester->add_whole(whole_);
    whole_.clear();
    job_.nbytes_done.fetch_add(unit.payload_nbytes, std::memory_order_relaxed);
  }

  void finish() override {
    if (job_.digester) job_.digester->finish(stop_);
  }

 private:
  // One read, or one for each stretch between payloads that are in place.
  void read(const Unit& unit) {
    make_room(unit);
    std::byte* header_to = headers_.data();
    uint64_t begin = 0, end = 0;  // of what the slices cover, from the unit's first byte
    const auto flush = [&] {
      if (!slices_.empty()) job_.source.read_at(unit.offset + begin, slices_, stop_);
      slices_.clear();
    };
    for (const Piece& piece : job_.plan.pieces_of(unit)) {
      const LoadTarget& target = job_.targets[piece.target];
      const bool is_header = piece.kind == Piece::Kind::header;
      if (!is_header && target.in_place) {
        flush();
        continue;
      }
      if (slices_.empty()) {
        begin = piece.unit_offset;
      } else if (piece.unit_offset > end) {
        slices_.emplace_back(gap_.data(), piece.unit_offset - end);
      }
      std::byte* const to = is_header ? header_to : target.destination.data + piece.target_offset;
      if (is_header) header_to += piece.nbytes;
      slices_.emplace_back(to, piece.nbytes);
      end = piece.unit_offset + piece.nbytes;
    }
    flush();
  }

  // For the headers and for the longest gap between records, before any slice points there.
  void make_room(const Unit& unit) {
    uint64_t headers = 0, gap = 0, end = 0;
    for (const Piece& piece : job_.plan.pieces_of(unit)) {
      if (piece.kind == Piece::Kind::header) headers += piece.nbytes;
      gap = std::max(gap, piece.unit_offset - end);
      end = piece.unit_offset + piece.nbytes;
    }
    if (headers_.size() < headers) headers_.resize(headers);
    if (gap_.size() < gap) gap_.resize(gap);
  }

  void accept_header(const Piece& piece, std::span<const std::byte> bytes) {
    format::RecordHeader header;
    if (const auto start = job_.accept_header(piece.target, bytes, header))
      whole_.push_back({piece.target, *start, {}});
  }

  void digest(const Piece& piece) {
    const std::span<const std::byte> bytes(
        job_.targets[piece.target].destination.data + piece.target_offset, piece.nbytes);
    if (job_.plan.hash_steps[piece.target] == 0) {
      whole_.back().bytes = bytes;  // its header came right before it
    } else {
      job_.digester->add(piece.target, piece.step, bytes);
    }
  }

  LoadJob& job_;
  const std::stop_token stop_;
  std::vector<io::Slice> slices_;
  std::vector<std::byte> headers_, gap_;
  std::vector<digest::RecordDigester::Whole> whole_;
};

}  // namespace

std::unique_ptr<UnitWorker> make_host_load(LoadJob& job, const std::stop_token& stop) {
  return std::make_unique<HostLoad>(job, stop);
}

}  // namespace tensorizer::load
