#include "io/http/http_range_fetch.h"

#include <string>
#include <utility>

namespace tensorizer::io {

RangeFetch::RangeFetch(HttpClient& client, const ResourceIdentity& known, uint64_t offset,
                       std::span<const Buffer> buffers, const RangeSource::Progress& progress)
    : client_(client),
      known_(known),
      offset_(offset),
      nbytes_(total_nbytes(buffers)),
      progress_(progress),
      into_(buffers) {
  if (auto line = condition_header(known)) request_.header_lines.push_back(std::move(*line));
  request_.gives_up_stalled_body = true;
}

void RangeFetch::put(std::span<const std::byte> bytes) {
  const size_t placed = into_.put(bytes);
  // What a thread reads that has seen the number is in place.
  done_.fetch_add(placed, std::memory_order_release);
  if (placed < bytes.size())
    throw HttpFailure{Errc::io, "the body is longer than the range that was asked for", ""};
}

uint64_t RangeFetch::run(const std::stop_token& stop, const HttpFailure* earlier) {
  with_http_retries(
      client_.options, client_.counters,
      [&] {
        // Not kept between tries: a request that pauses leaves its place to others.
        const HttpPlace place(client_.places, stop);
        while (done() < nbytes_ && !at_end_) attempt(place, stop);
      },
      [&] { return done(); },
      [&](const HttpFailure& failure, int tries) {
        HttpFailure described = failure;
        described.reason = "bytes " + range_text(offset_, nbytes_) + ": " + failure.reason;
        return to_error(described, "Failed to read", client_.endpoint.name(), tries,
                        offset_ + done());
      },
      stop, earlier);
  return done();
}

void RangeFetch::attempt(const HttpPlace& place, const std::stop_token& stop) {
  try {
    receive(place, stop);
  } catch (const HttpFailure& failure) {
    if (failure.stalled_body) {
      request_.gives_up_stalled_body = false;  // what comes in its place is waited for
    } else if (failure.status == 416 && !known_.size) {
      at_end_ = true;  // an object of unknown size ends where its server says that there is no more
    } else {
      throw;
    }
  }
}

void RangeFetch::receive(const HttpPlace& place, const std::stop_token& stop) {
  const uint64_t start = done();
  const RangeRequest wanted{offset_ + start, nbytes_ - start, &known_, false};
  request_.range = range_text(wanted.first, wanted.nbytes);
  const auto accept = [&](const ResponseHead& head) -> BodySink* {
    expected_ = check_response(wanted, head).body_nbytes.value_or(0);
    return this;
  };
  const auto exchange = client_.start(place, request_, accept, stop);
  std::function<void()> tell;
  if (progress_) tell = [this] { progress_(done_.load(std::memory_order_acquire)); };
  exchange->wait_for_body(stop, {}, tell);
  const uint64_t received = done() - start;
  if (received != expected_)
    throw HttpFailure{.reason = "the body ended after " + std::to_string(received) + " of " +
                                std::to_string(expected_) + " bytes",
                      .transient = true};
}

}  // namespace tensorizer::io
