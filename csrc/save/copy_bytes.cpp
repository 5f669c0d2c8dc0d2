#include "save/copy_bytes.h"

#include <algorithm>
#include <vector>

#include "core/error.h"
#include "core/run_units.h"
#include "core/stop.h"
#include "core/threads.h"
#include "core/turns.h"
#include "save/unit_size.h"

namespace tensorizer::save {
namespace {

constexpr unsigned kMostWorkers = 16;  // each holds a unit

// Calls use(offset, bytes) with all bytes of a source, in order. Returns how many there were.
template <class Use>
uint64_t read_in_order(io::RangeSource& source, const std::stop_token& stop, Use&& use) {
  std::vector<std::byte> buffer(std::min(kUnitNbytes, source.size().value_or(kUnitNbytes)));
  for (uint64_t offset = 0;;) {
    throw_if_stopped(stop);
    const uint64_t got = source.read_up_to(offset, io::Slice(buffer), stop);
    if (got > 0) use(offset, io::ConstSlice(buffer).first(got));
    offset += got;
    if (got < buffer.size() || offset == source.size()) return offset;
  }
}

bool is_read_in_order(const io::RangeSource& source) {
  return !source.size() || source.traits().sequential;
}

}  // namespace

uint64_t copy_bytes(io::RangeSource& source, io::RangeSink& sink, std::atomic<uint64_t>& done,
                    const std::stop_token& stop) {
  if (const auto total = source.size()) sink.reserve(*total);
  if (is_read_in_order(source)) {
    return read_in_order(source, stop, [&](uint64_t offset, io::ConstSlice bytes) {
      sink.write_at(offset, bytes, stop);
      done.fetch_add(bytes.size(), std::memory_order_relaxed);
    });
  }
  const uint64_t total = *source.size();
  const uint64_t units = (total + kUnitNbytes - 1) / kUnitNbytes;
  std::atomic<uint64_t> next{0};
  const unsigned wanted = std::max({source.traits().concurrency, sink.concurrency(), cpu_quota()});
  const auto workers =
      static_cast<unsigned>(std::clamp<uint64_t>(units, 1, std::min(wanted, kMostWorkers)));
  run_workers(workers, stop, [&](const std::stop_token& token) {
    std::vector<std::byte> buffer;
    for (uint64_t i = next.fetch_add(1); i < units; i = next.fetch_add(1)) {
      throw_if_stopped(token);
      const uint64_t offset = i * kUnitNbytes;
      buffer.resize(std::min(kUnitNbytes, total - offset));
      source.read_at(offset, io::Slice(buffer), token);
      sink.write_at(offset, io::ConstSlice(buffer), token);
      done.fetch_add(buffer.size(), std::memory_order_relaxed);
    }
  });
  return total;
}

format::Sha256Digest sha256_of(io::RangeSource& source, std::atomic<uint64_t>& done,
                               const std::stop_token& stop) {
  format::Sha256 sha256;
  const auto hash = [&](uint64_t, io::ConstSlice bytes) {
    sha256.update(bytes);
    done.fetch_add(bytes.size(), std::memory_order_relaxed);
  };
  if (is_read_in_order(source)) {
    read_in_order(source, stop, hash);
    return sha256.finish();
  }
  const uint64_t total = *source.size();
  const uint64_t units = (total + kUnitNbytes - 1) / kUnitNbytes;
  std::atomic<uint64_t> next{0};
  Turns turns;
  run_workers(2, stop, [&](const std::stop_token& token) {
    std::vector<std::byte> buffer;
    for (uint64_t i = next.fetch_add(1); i < units; i = next.fetch_add(1)) {
      const uint64_t offset = i * kUnitNbytes;
      buffer.resize(std::min(kUnitNbytes, total - offset));
      source.read_at(offset, io::Slice(buffer), token);
      const Turns::Turn turn(turns, i, token);
      hash(offset, buffer);
    }
  });
  return sha256.finish();
}

}  // namespace tensorizer::save
