#include "save/plain_writer.h"

#include <algorithm>
#include <vector>

#include "core/run_units.h"
#include "core/stop.h"
#include "core/threads.h"
#include "save/unit_size.h"

namespace tensorizer::save {
namespace {

constexpr size_t kUnitSlices = 512;

// One write: slices that are neighbours in the sink.
struct Write {
  uint64_t offset = 0, nbytes = 0;
  std::vector<io::ConstSlice> slices;
  bool continues_at(uint64_t where) const { return !slices.empty() && offset + nbytes == where; }
};

std::vector<Write> cut(std::span<const PlainPiece> pieces) {
  std::vector<Write> units;
  Write open;
  auto close = [&] {
    if (!open.slices.empty()) units.push_back(std::move(open));
    open = Write{};
  };
  for (const PlainPiece& piece : pieces) {
    for (uint64_t at = 0; at < piece.bytes.size();) {
      const uint64_t where = piece.offset + at;
      const bool full = open.nbytes >= kUnitNbytes || open.slices.size() >= kUnitSlices;
      if (full || !open.continues_at(where)) {
        close();
        open.offset = where;
      }
      const uint64_t n = std::min(kUnitNbytes - open.nbytes, piece.bytes.size() - at);
      open.slices.push_back(piece.bytes.subspan(at, n));
      open.nbytes += n;
      at += n;
    }
  }
  close();
  return units;
}

}  // namespace

PlainWriter::PlainWriter(std::shared_ptr<io::RangeSink> sink, unsigned max_workers)
    : sink_(std::move(sink)), max_workers_(max_workers) {}

void PlainWriter::write(std::span<const PlainPiece> pieces, const std::stop_token& stop) {
  const std::vector<Write> units = cut(pieces);
  std::atomic<size_t> next{0};
  const unsigned wanted = sink_->concurrency() != 0 ? sink_->concurrency() : cpu_quota();
  unsigned count = max_workers_ != 0 ? std::min(wanted, max_workers_) : wanted;
  count = static_cast<unsigned>(std::clamp<size_t>(units.size(), 1, count));
  run_workers(count, stop, [&](const std::stop_token& token) {
    while (true) {
      throw_if_stopped(token);
      const size_t i = next.fetch_add(1, std::memory_order_relaxed);
      if (i >= units.size()) break;
      sink_->write_at(units[i].offset, units[i].slices, token);
      nbytes_done_.fetch_add(units[i].nbytes, std::memory_order_relaxed);
    }
  });
}

}  // namespace tensorizer::save
