#include "save/copy_bytes.h"

#include <algorithm>
#include <functional>
#include <vector>

#include "core/checked_math.h"
#include "core/error.h"
#include "core/run_units.h"
#include "core/threads.h"
#include "core/turns.h"
#include "save/record_writer.h"

namespace tensorizer::save {
namespace {

constexpr unsigned kMostWorkers = 16;  // each holds a unit

using UseBytes =
    std::function<void(uint64_t offset, io::ConstBuffer bytes, const std::stop_token&)>;

class Reader final : public UnitWorker {
 public:
  Reader(io::RangeSource& source, uint64_t total, const UseBytes& use, const std::stop_token& stop)
      : source_(source), total_(total), use_(use), stop_(stop) {}

  void process(size_t unit) override {
    const uint64_t offset = unit * kUnitNbytes;
    buffer_.resize(std::min(kUnitNbytes, total_ - offset));
    source_.read_at(offset, io::Buffer(buffer_), stop_);
    use_(offset, buffer_, stop_);
  }

 private:
  io::RangeSource& source_;
  const uint64_t total_;
  const UseBytes& use_;
  const std::stop_token stop_;
  std::vector<std::byte> buffer_;
};

// Calls use(offset, bytes, stop) with all units of a source; returns how many bytes there were.
uint64_t read_all(io::RangeSource& source, unsigned workers, const std::stop_token& stop,
                  const UseBytes& use) {
  if (source.size() && !source.traits().sequential) {
    const uint64_t total = *source.size();
    source.begin_load(total, stop);
    const uint64_t units = ceil_div(total, kUnitNbytes);
    workers = static_cast<unsigned>(std::clamp<uint64_t>(units, 1, workers));
    std::atomic<size_t> next{0};
    run_units(units, next, workers, stop, [&](const std::stop_token& token) {
      return std::make_unique<Reader>(source, total, use, token);
    });
    return total;
  }
  std::vector<std::byte> buffer(std::min(kUnitNbytes, source.size().value_or(kUnitNbytes)));
  for (uint64_t offset = 0;;) {
    throw_if_stopped(stop);
    const uint64_t got = source.read_up_to(offset, io::Buffer(buffer), stop);
    if (got > 0) use(offset, io::ConstBuffer(buffer).first(got), stop);
    offset += got;
    if (got < buffer.size() || offset == source.size()) return offset;
  }
}

}  // namespace

uint64_t copy_bytes(io::RangeSource& source, io::RangeSink& sink, std::atomic<uint64_t>& done,
                    const std::stop_token& stop) {
  if (const auto total = source.size()) sink.reserve(*total);
  const unsigned wanted = std::max({source.traits().concurrency, sink.concurrency(), cpu_quota()});
  const unsigned most = sink.in_order()     ? 1
                        : sink.places() > 0 ? std::min(kMostWorkers, sink.places())
                                            : kMostWorkers;
  return read_all(source, std::min(wanted, most), stop,
                  [&](uint64_t offset, io::ConstBuffer bytes, const std::stop_token& token) {
                    sink.write_at(offset, bytes, token);
                    done.fetch_add(bytes.size(), std::memory_order_relaxed);
                  });
}

digest::Sha256Digest sha256_of(io::RangeSource& source, std::atomic<uint64_t>& done,
                               const std::stop_token& stop) {
  digest::Sha256 sha256;
  Turns turns;
  read_all(source, 2, stop,
           [&](uint64_t offset, io::ConstBuffer bytes, const std::stop_token& token) {
             const Turns::Turn turn(turns, offset / kUnitNbytes, token);
             sha256.update(bytes);
             done.fetch_add(bytes.size(), std::memory_order_relaxed);
           });
  return sha256.finish();
}

}  // namespace tensorizer::save
