// One range of an object, fetched into memory: resumed at its byte where it breaks.
#pragma once

#include <atomic>
#include <cstdint>
#include <span>
#include <stop_token>

#include "io/buffers.h"
#include "io/http/http_client.h"
#include "io/range_source.h"

namespace tensorizer::io {

// Confined to one thread, but for the sink, which belongs to the exchange while there is one.
class RangeFetch final : private BodySink {
 public:
  // Fills `buffers` with the bytes from `offset` on. `known` is the object's identity; all outlive
  // this.
  RangeFetch(HttpClient& client, const ResourceIdentity& known, uint64_t offset,
             std::span<const Buffer> buffers, const RangeSource::Progress& progress);

  // Returns the bytes that were read: all, or fewer where the object of unknown size has ended.
  // `earlier`, if not null, counts as the first try.
  uint64_t run(const std::stop_token& stop, const HttpFailure* earlier = nullptr);

 private:
  // One request for what is missing.
  void attempt(const HttpPlace& place, const std::stop_token& stop);
  void receive(const HttpPlace& place, const std::stop_token& stop);
  void put(std::span<const std::byte> bytes) override;
  uint64_t done() const noexcept { return done_.load(std::memory_order_relaxed); }

  HttpClient& client_;
  const ResourceIdentity& known_;
  const uint64_t offset_;
  const uint64_t nbytes_;
  const RangeSource::Progress& progress_;
  ScatterCursor into_;             // where the rest goes
  std::atomic<uint64_t> done_{0};  // bytes that are in place
  HttpRequest request_;
  uint64_t expected_ = 0;  // of what runs
  bool at_end_ = false;
};

}  // namespace tensorizer::io
