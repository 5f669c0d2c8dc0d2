// One range of an object, fetched into memory: resumed where it breaks, asked twice where it lags.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <stop_token>

#include "io/http/http_client.h"
#include "io/slices.h"

namespace tensorizer::io {

// What one connection of a source has shown: bytes per second, seconds to the first byte; 0 while
// unknown. Any thread may look and note.
class TypicalSpeed {
 public:
  double rate() const noexcept { return rate_.load(std::memory_order_relaxed); }
  double first_byte() const noexcept { return first_byte_.load(std::memory_order_relaxed); }
  void note_rate(double rate) noexcept { note(rate_, rate); }
  void note_first_byte(double seconds) noexcept { note(first_byte_, seconds); }

 private:
  static void note(std::atomic<double>& average, double value) noexcept {
    const double before = average.load(std::memory_order_relaxed);
    // A lost update only makes the average a little older.
    average.store(before == 0 ? value : before * 0.75 + value * 0.25, std::memory_order_relaxed);
  }

  std::atomic<double> rate_{0};
  std::atomic<double> first_byte_{0};
};

// Confined to one thread.
class RangeFetch {
 public:
  // Fills `slices` with the bytes from `offset` on. `known` is the object's identity; all outlive
  // this.
  RangeFetch(HttpClient& client, TypicalSpeed& typical, const ResourceIdentity& known,
             uint64_t offset, std::span<const Slice> slices) noexcept
      : client_(client),
        typical_(typical),
        known_(known),
        offset_(offset),
        slices_(slices),
        nbytes_(total_nbytes(slices)) {}

  // Returns the bytes that were read: all, or fewer where the object of unknown size has ended.
  // `earlier`, if not null, counts as the first try.
  uint64_t run(const std::stop_token& stop, const HttpFailure* earlier = nullptr);

 private:
  class Part;
  class Race;
  void attempt(const HttpDeadline& deadline, const std::stop_token& stop);

  HttpClient& client_;
  TypicalSpeed& typical_;
  const ResourceIdentity& known_;
  const uint64_t offset_;
  const std::span<const Slice> slices_;
  const uint64_t nbytes_;
  uint64_t done_ = 0;
  bool at_end_ = false;
};

}  // namespace tensorizer::io
