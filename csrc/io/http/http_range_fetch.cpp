#include "io/http/http_range_fetch.h"

#include <atomic>
#include <functional>
#include <string>
#include <utility>

namespace tensorizer::io {
namespace {

// Puts the bodies of all tries, one behind the other, into the caller's memory.
class RangeSink final : public BodySink {
 public:
  explicit RangeSink(std::span<const Buffer> buffers) noexcept : into_(buffers) {}

  void put(std::span<const std::byte> bytes) override {
    const size_t placed = into_.put(bytes);
    // What a thread reads that has seen the number is in place.
    done_.fetch_add(placed, std::memory_order_release);
    if (placed < bytes.size())
      throw HttpFailure{Errc::io, "the body is longer than the range that was asked for", ""};
  }
  // Bytes that are in place.
  uint64_t done() const noexcept { return done_.load(std::memory_order_acquire); }

 private:
  ScatterCursor into_;  // where the rest goes
  std::atomic<uint64_t> done_{0};
};

}  // namespace

uint64_t fetch_range(HttpClient& client, const ResourceIdentity& known, uint64_t offset,
                     std::span<const Buffer> buffers, const std::stop_token& stop,
                     const RangeSource::Progress& progress, const HttpFailure* earlier) {
  const uint64_t nbytes = total_nbytes(buffers);
  RangeSink sink(buffers);
  HttpRequest request{.gives_up_stalled_body = true};
  if (auto line = condition_header(known)) request.header_lines.push_back(std::move(*line));
  bool at_end = false;

  std::function<void()> on_idle;
  if (progress)
    on_idle = [&, told = uint64_t{0}]() mutable {
      if (const uint64_t done = sink.done(); std::exchange(told, done) != done) progress();
    };

  const auto fetch_rest = [&] {
    // Not kept between tries: a request that pauses leaves its place to others.
    const HttpPlace place(client.places, stop);
    for (uint64_t start = 0; (start = sink.done()) < nbytes && !at_end;) {
      const RangeRequest wanted{offset + start, nbytes - start, &known, false};
      request.range = range_text(wanted.first, wanted.nbytes);
      uint64_t expected = 0;
      const auto accept = [&](const HttpResponse& response) -> BodySink* {
        expected = check_response(wanted, response).body_nbytes.value_or(0);
        return &sink;
      };
      try {
        client.start(place, request, accept, stop)->wait_for_body(stop, {}, on_idle);
        const uint64_t received = sink.done() - start;
        if (received != expected)
          throw HttpFailure{.reason = "the body ended after " + std::to_string(received) + " of " +
                                      std::to_string(expected) + " bytes",
                            .transient = true};
      } catch (const HttpFailure& failure) {
        if (failure.stalled_body) {
          request.gives_up_stalled_body = false;  // what comes in its place is waited for
        } else if (failure.status == 416 && !known.size) {
          at_end =
              true;  // an object of unknown size ends where its server says that there is no more
        } else {
          throw;
        }
      }
    }
  };
  const auto describe = [&](const HttpFailure& failure, int tries) {
    HttpFailure described = failure;
    described.reason = "bytes " + range_text(offset, nbytes) + ": " + failure.reason;
    return to_error(described, "Failed to read", client.endpoint.name(), tries,
                    offset + sink.done());
  };
  with_http_retries(
      client.options, client.counters, fetch_rest, [&] { return sink.done(); }, describe, stop,
      earlier);
  return sink.done();
}

}  // namespace tensorizer::io
