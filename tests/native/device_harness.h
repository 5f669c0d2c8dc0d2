// Loads and saves as sessions do them, small, for tests of CudaCopyEngine on the fake driver.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <functional>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "bytes.h"
#include "core/run_units.h"
#include "fake_driver.h"

namespace tensorizer::device::cuda::tests {

using testing::Bytes;
using testing::random_bytes;
using testing::same;

inline constexpr PinnedSettings kFewBuffers{4, 64 << 10, std::chrono::milliseconds(60'000)};

inline CudaCopyOptions options(void* stream = nullptr, int device = 0) {
  CudaCopyOptions made;
  made.device = device;
  made.caller_stream = reinterpret_cast<uintptr_t>(stream);
  made.pinned = kFewBuffers;
  return made;
}

// The first device's kernels as at the start of a process, and right.
inline void begin_untested() {
  fake().break_kernels(0);
  Device::get(0).kernels_tested().note(std::nullopt);
}

// One stretch of a source that becomes one buffer: where its bytes go on the device.
struct Unit {
  uint64_t offset;
  std::vector<CopyPiece> pieces;
};

// Cuts [0, nbytes) into buffers, and each buffer into pieces of `piece_nbytes`; destination is
// contiguous.
inline std::vector<Unit> plan(std::byte* destination, uint64_t nbytes, uint64_t buffer_nbytes,
                              uint64_t piece_nbytes) {
  std::vector<Unit> units;
  for (uint64_t at = 0; at < nbytes; at += buffer_nbytes) {
    Unit unit{at, {}};
    const uint64_t end = std::min(nbytes, at + buffer_nbytes);
    for (uint64_t piece = at; piece < end; piece += piece_nbytes)
      unit.pieces.push_back({piece - at, destination + piece, std::min(piece_nbytes, end - piece)});
    units.push_back(std::move(unit));
  }
  return units;
}

// What a load does: workers take units, fill buffers, send. Rethrows the first failure after all
// have ended.
inline void load(CopyEngine& engine, const Bytes& source, const std::vector<Unit>& units,
                 unsigned workers = 3) {
  std::atomic<size_t> next{0};
  for_each_index(workers, workers, {}, [&](size_t, const std::stop_token& stop) {
    const std::unique_ptr<Copier> copier = engine.make_copier(false);
    for (size_t n = next++; n < units.size(); n = next++) {
      const std::span<std::byte> buffer = next_buffer(*copier, stop, [] {});
      for (const CopyPiece& piece : units[n].pieces)
        std::copy_n(source.data() + units[n].offset + piece.buffer_offset, piece.nbytes,
                    buffer.data() + piece.buffer_offset);
      copier->send(units[n].pieces, stop);
    }
    copier->finish(stop);
  });
}

// What a save does.
inline Bytes save(CopyEngine& engine, uint64_t nbytes, const std::vector<Unit>& units,
                  unsigned workers = 3) {
  Bytes result(nbytes);
  std::atomic<size_t> next{0};
  for_each_index(workers, workers, {}, [&](size_t, const std::stop_token& stop) {
    const std::unique_ptr<Copier> copier = engine.make_copier(false);
    for (size_t n = next++; n < units.size(); n = next++) {
      const std::span<std::byte> buffer = next_buffer(*copier, stop, [] {});
      copier->begin_fetch(units[n].pieces, stop);
      copier->end_fetch(stop);
      for (const CopyPiece& piece : units[n].pieces)
        std::copy_n(buffer.data() + piece.buffer_offset, piece.nbytes,
                    result.data() + units[n].offset + piece.buffer_offset);
    }
  });
  return result;
}

inline Errc code_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    return error.code();
  }
  ADD_FAILURE() << "nothing was thrown";
  return Errc::invalid_argument;
}

}  // namespace tensorizer::device::cuda::tests
