// One range of an object, fetched into memory: resumed where it breaks, and where it lags.
#pragma once

#include <atomic>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <stop_token>
#include <string>
#include <vector>

#include "io/http/http_client.h"
#include "io/range_source.h"
#include "io/slices.h"

namespace tensorizer::io {

// What one connection of a source has shown: bytes per second, seconds to the first byte; 0 while
// unknown. Any thread may look and note.
class TypicalSpeed {
 public:
  void note_rate(double rate) noexcept { note(rate_, rate); }
  void note_first_byte(double seconds) noexcept { note(first_byte_, seconds); }
  std::chrono::duration<double> first_byte() const noexcept {
    return std::chrono::duration<double>(first_byte_.load(std::memory_order_relaxed));
  }
  // How long a request for so many bytes takes; without end while nobody knows.
  std::chrono::duration<double> seconds_for(uint64_t nbytes) const noexcept {
    const double rate = rate_.load(std::memory_order_relaxed);
    return std::chrono::duration<double>(rate > 0 ? static_cast<double>(nbytes) / rate
                                                  : std::numeric_limits<double>::infinity());
  }

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
class RangeFetch final : private BodySink {
 public:
  // Fills `slices` with the bytes from `offset` on. `known` is the object's identity; all outlive
  // this.
  RangeFetch(HttpClient& client, TypicalSpeed& typical, const ResourceIdentity& known,
             uint64_t offset, std::span<const Slice> slices, const RangeSource::Progress& progress);

  // Returns the bytes that were read: all, or fewer where the object of unknown size has ended.
  // `earlier`, if not null, counts as the first try.
  uint64_t run(const std::stop_token& stop, const HttpFailure* earlier = nullptr);

 private:
  // One request for what is missing, and whether it was made: one that lags is given up.
  void attempt(HttpClient::Permit& permit, const std::stop_token& stop);
  void receive(HttpClient::Permit& permit, const std::stop_token& stop);
  // Both return the seconds to the first byte; the first one nullopt where libcurl has to do it.
  std::optional<double> receive_directly(HttpClient::Permit& permit, const std::stop_token& stop);
  double receive_by_curl(HttpClient::Permit& permit, const std::stop_token& stop);
  // Between pieces of the body.
  void meanwhile() const;
  void accept(const ResponseHead& head);
  void put(std::span<const std::byte> bytes) override;
  uint64_t done() const noexcept { return nbytes_ - into_.room(); }

  HttpClient& client_;
  TypicalSpeed& typical_;
  const ResourceIdentity& known_;
  const uint64_t offset_;
  const uint64_t nbytes_;
  const RangeSource::Progress& progress_;
  HttpDeadline deadline_;
  ScatterCursor into_;  // where the rest goes
  // What runs, how much was there before, and what it brings.
  HttpRequest request_;
  uint64_t start_ = 0;
  uint64_t expected_ = 0;
  int lagged_ = 0;
  bool at_end_ = false;
};

}  // namespace tensorizer::io
