#include "io/http/http_range_fetch.h"

#include <string>
#include <utility>
#include <vector>

#include "io/http/direct_read.h"

namespace tensorizer::io {
namespace {

using Clock = HttpDeadline::Clock;

// Another connection may bring the rest of a body sooner.
struct SlowBody {};

}  // namespace

RangeFetch::RangeFetch(HttpClient& client, TypicalSpeed& typical, const ResourceIdentity& known,
                       uint64_t offset, std::span<const Slice> slices,
                       const RangeSource::Progress& progress)
    : client_(client),
      typical_(typical),
      known_(known),
      offset_(offset),
      nbytes_(total_nbytes(slices)),
      progress_(progress),
      deadline_(client.options),
      into_(slices) {
  if (auto line = condition_header(known)) request_.header_lines.push_back(std::move(*line));
}

void RangeFetch::meanwhile() const {
  deadline_.check();
  if (is_slow()) throw SlowBody();
  if (progress_) progress_(done());
}

// Only a body can be slow: a request without an answer would wait as long on another connection.
bool RangeFetch::is_slow() const {
  constexpr int kMuchLonger = 4;
  const std::chrono::duration<double> least = client_.options.hedge_after;
  if (!body_since_ || was_slow_ || least.count() == 0) return false;
  const std::chrono::duration<double> spent = Clock::now() - *body_since_;
  return spent >= least && spent >= kMuchLonger * typical_.seconds_for(expected_);
}

void RangeFetch::accept(const ResponseHead& head) {
  const RangeRequest request{offset_ + start_, nbytes_ - start_, &known_, false};
  expected_ = check_response(request, head).body_nbytes.value_or(0);
  body_since_ = Clock::now();
}

void RangeFetch::put(std::span<const std::byte> bytes) {
  if (into_.put(bytes) < bytes.size())
    throw HttpFailure{Errc::io, "the body is longer than the range that was asked for", ""};
}

uint64_t RangeFetch::run(const std::stop_token& stop, const HttpFailure* earlier) {
  bool waited = false;
  with_retries(
      client_.options, client_.counters, deadline_,
      [&] {
        // Not kept between tries: who pauses leaves the place to others.
        HttpClient::Permit permit = client_.enter(stop, for_socket());
        if (!std::exchange(waited, true)) deadline_.restart();
        while (done() < nbytes_ && !at_end_) attempt(permit, stop);
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

void RangeFetch::attempt(HttpClient::Permit& permit, const std::stop_token& stop) {
  try {
    receive(permit, stop);
  } catch (const SlowBody&) {
    was_slow_ = true;
    permit.connection->carrier().close();
  } catch (const HttpFailure& failure) {
    // An object of unknown size ends where its server says that there is no more.
    if (failure.status != 416 || known_.size) throw;
    at_end_ = true;
  }
}

void RangeFetch::receive(HttpClient::Permit& permit, const std::stop_token& stop) {
  const Clock::time_point begun = Clock::now();
  start_ = done();
  expected_ = 0;
  body_since_.reset();
  request_.range = range_text(offset_ + start_, nbytes_ - start_);
  if (!receive_directly(permit, stop)) receive_by_curl(permit, stop);
  const uint64_t received = done() - start_;
  if (received != expected_)
    throw HttpFailure{.reason = "the body ended after " + std::to_string(received) + " of " +
                                std::to_string(expected_) + " bytes",
                      .transient = true};
  const double seconds = std::chrono::duration<double>(Clock::now() - begun).count();
  if (received > 0 && seconds > 0) typical_.note_rate(static_cast<double>(received) / seconds);
}

bool RangeFetch::receive_directly(HttpClient::Permit& permit, const std::stop_token& stop) {
  if (client_.indirect_reads.load() > 0) {
    if (is_large()) client_.indirect_reads.fetch_sub(1);
    return false;
  }
  client_.connections.move(permit.connection, permit.target->url.origin, stop);
  HttpCarrier& carrier = permit.connection->carrier();
  // A connection that is there serves what it can; a new socket is for large reads.
  if (carrier.has_curl() || (!carrier.has_socket() && !is_large())) return false;
  const HttpRequest addressed = permit.to_target(request_);
  try {
    if (direct_read(carrier.socket(),
                    {client_, addressed, [&](const ResponseHead& head) { accept(head); }, into_,
                     [&] { meanwhile(); }},
                    stop))
      return true;
  } catch (const HttpFailure& failure) {
    // There may be another address by now, or other headers.
    if (!client_.refused(permit, failure, stop) || done() > start_) throw;
  }
  // One of libcurl's may be waiting.
  client_.connections.enter_again(permit.connection, permit.target->url.origin, stop);
  return false;
}

void RangeFetch::receive_by_curl(HttpClient::Permit& permit, const std::stop_token& stop) {
  const auto accept_here = [&](const ResponseHead& head) -> BodySink* {
    accept(head);
    return this;
  };
  const auto exchange = client_.start(permit, request_, accept_here, deadline_, stop);
  drive(permit.connection->carrier().curl(), stop, [&] {
    meanwhile();
    return exchange->check();
  });
}

}  // namespace tensorizer::io
