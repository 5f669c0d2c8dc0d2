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

// Speed that one connection of a source has shown, in bytes per second; 0 while unknown. Any thread
// may look and note.
class TypicalRate {
 public:
  double get() const noexcept { return rate_.load(std::memory_order_relaxed); }
  void note(double rate) noexcept {
    const double before = get();
    // A lost update only makes the average a little older.
    rate_.store(before == 0 ? rate : before * 0.75 + rate * 0.25, std::memory_order_relaxed);
  }

 private:
  std::atomic<double> rate_{0};
};

// Confined to one thread.
class RangeFetch {
 public:
  // Fills `slices` with the bytes from `offset` on. `known` is the object's identity; all outlive
  // this.
  RangeFetch(HttpClient& client, TypicalRate& typical, const ResourceIdentity& known,
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
  void attempt(const HttpDeadline& deadline, const std::stop_token& stop);
  std::unique_ptr<Part> start_hedge(CurlLane& lane) const;
  bool hedge_is_due(std::chrono::steady_clock::time_point started, uint64_t received) const;

  HttpClient& client_;
  TypicalRate& typical_;
  const ResourceIdentity& known_;
  const uint64_t offset_;
  const std::span<const Slice> slices_;
  const uint64_t nbytes_;
  uint64_t done_ = 0;
  bool at_end_ = false;
};

}  // namespace tensorizer::io
