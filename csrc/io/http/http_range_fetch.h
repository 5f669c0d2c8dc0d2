// One range of an object, fetched into memory: resumed where it breaks, and once where its body
// comes much more slowly than others do.
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

// The bytes per second that requests of a source bring. Any thread may look and note.
class TypicalSpeed {
 public:
  void note_rate(double rate) noexcept {
    const double before = rate_.load(std::memory_order_relaxed);
    // A lost update only makes the average a little older.
    rate_.store(before == 0 ? rate : before * 0.75 + rate * 0.25, std::memory_order_relaxed);
  }
  // How long a request for so many bytes takes; without end while nobody knows.
  std::chrono::duration<double> seconds_for(uint64_t nbytes) const noexcept {
    const double rate = rate_.load(std::memory_order_relaxed);
    return std::chrono::duration<double>(rate > 0 ? static_cast<double>(nbytes) / rate
                                                  : std::numeric_limits<double>::infinity());
  }

 private:
  std::atomic<double> rate_{0};  // 0 while unknown
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
  // One request for what is missing, up to its end or until it is given up for a slow body.
  void attempt(HttpClient::Permit& permit, const std::stop_token& stop);
  void receive(HttpClient::Permit& permit, const std::stop_token& stop);
  // False: libcurl has to do it.
  bool receive_directly(HttpClient::Permit& permit, const std::stop_token& stop);
  void receive_by_curl(HttpClient::Permit& permit, const std::stop_token& stop);
  // While the response comes.
  void meanwhile() const;
  bool is_slow() const;
  // What direct_read is to send, if anything.
  const HttpRequest* for_socket() const noexcept {
    return is_large() && client_.indirect_reads.load() == 0 ? &request_ : nullptr;
  }
  bool is_large() const noexcept { return nbytes_ >= client_.options.direct_nbytes; }
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
  std::optional<HttpDeadline::Clock::time_point> body_since_;
  bool was_slow_ = false;  // a body was given up: what comes in its place is waited for
  bool at_end_ = false;
};

}  // namespace tensorizer::io
