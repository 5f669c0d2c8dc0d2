#include "save/copy_bytes.h"

#include <algorithm>
#include <vector>

#include "core/error.h"
#include "core/run_units.h"
#include "core/stop.h"
#include "core/sync.h"
#include "core/threads.h"
#include "save/unit_size.h"

namespace tensorizer::save {
namespace {

constexpr unsigned kMostWorkers = 16;  // each holds a unit

uint64_t size_of(const io::RangeSource& source) {
  const auto nbytes = source.size();
  if (!nbytes) throw Error(Errc::io, source.name() + ": its size is unknown", source.name());
  return *nbytes;
}

}  // namespace

uint64_t copy_bytes(io::RangeSource& source, io::RangeSink& sink, std::atomic<uint64_t>& done,
                    const std::stop_token& stop) {
  const uint64_t total = size_of(source);
  const uint64_t units = (total + kUnitNbytes - 1) / kUnitNbytes;
  sink.reserve(total);
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
  const uint64_t total = size_of(source);
  const uint64_t units = (total + kUnitNbytes - 1) / kUnitNbytes;
  format::Sha256 sha256;
  std::atomic<uint64_t> next{0};
  Mutex mutex;
  CondVar changed;
  uint64_t turn = 0;  // guarded by mutex: the unit that is hashed next
  run_workers(2, stop, [&](const std::stop_token& token) {
    std::vector<std::byte> buffer;
    for (uint64_t i = next.fetch_add(1); i < units; i = next.fetch_add(1)) {
      const uint64_t offset = i * kUnitNbytes;
      buffer.resize(std::min(kUnitNbytes, total - offset));
      source.read_at(offset, io::Slice(buffer), token);
      {
        MutexLock lock(mutex);
        if (!changed.wait(mutex, token, [&] { return turn == i; }))
          throw Error(Errc::cancelled, "cancelled");
      }
      sha256.update(buffer);
      done.fetch_add(buffer.size(), std::memory_order_relaxed);
      MutexLock lock(mutex);
      ++turn;
      changed.notify_all();
    }
  });
  return sha256.finish();
}

}  // namespace tensorizer::save
