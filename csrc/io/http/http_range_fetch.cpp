#include "io/http/http_range_fetch.h"

#include <string>
#include <utility>
#include <vector>

#include "io/http/direct_read.h"

namespace tensorizer::io {
namespace {

using Clock = std::chrono::steady_clock;

}  // namespace

RangeFetch::RangeFetch(HttpClient& client, TypicalSpeed& typical, const ResourceIdentity& known,
                       uint64_t offset, std::span<const Slice> slices,
                       const RangeSource::Progress& progress)
    : client_(client),
      typical_(typical),
      known_(known),
      offset_(offset),
      slices_(slices),
      nbytes_(total_nbytes(slices)),
      progress_(progress),
      deadline_(client.options) {
  if (auto line = condition_header(known)) conditions_.push_back(std::move(*line));
}

void RangeFetch::meanwhile() const {
  deadline_.check();
  if (progress_) progress_(done_);
}

void RangeFetch::accept(const ResponseHead& head) {
  const RangeRequest request{offset_ + start_, nbytes_ - start_, &known_, false};
  expected_ = check_response(request, head).body_nbytes.value_or(0);
  deadline_.begin_request([this] { return typical_.seconds_for(expected_); }, lagged_);
}

void RangeFetch::put(std::span<const std::byte> bytes) {
  const size_t placed = into_.put(bytes);
  done_ += placed;
  if (placed < bytes.size())
    throw HttpFailure{Errc::io, "the body is longer than the range that was asked for", ""};
}

uint64_t RangeFetch::run(const std::stop_token& stop, const HttpFailure* earlier) {
  bool waited = false;
  with_retries(
      client_.options, client_.counters, deadline_,
      [&] {
        // Not kept between tries: who pauses leaves the place to others.
        HttpClient::Permit permit = client_.enter(stop);
        if (!std::exchange(waited, true)) deadline_.restart();
        while (done_ < nbytes_ && !at_end_) attempt(permit, stop);
      },
      [&] { return done_; },
      [&](const HttpFailure& failure, int tries) {
        HttpFailure described = failure;
        described.reason = "bytes " + range_text(offset_, nbytes_) + ": " + failure.reason;
        return to_error(described, "Failed to read", client_.endpoint.name(), tries,
                        offset_ + done_);
      },
      stop, earlier);
  return done_;
}

void RangeFetch::attempt(HttpClient::Permit& permit, const std::stop_token& stop) {
  deadline_.begin_request([this] { return typical_.first_byte(); }, lagged_);
  try {
    receive(permit, stop);
  } catch (const HttpLag&) {
    ++lagged_;
  } catch (const HttpFailure& failure) {
    deadline_.end_request();
    // An object of unknown size ends where its server says that there is no more.
    if (failure.status != 416 || known_.size) throw;
    at_end_ = true;
  }
}

void RangeFetch::receive(HttpClient::Permit& permit, const std::stop_token& stop) {
  const Clock::time_point begun = Clock::now();
  start_ = done_;
  expected_ = 0;
  into_ = ScatterCursor(slices_, start_);
  const std::string range = range_text(offset_ + start_, nbytes_ - start_);
  double first_byte = receive_directly(permit, range, stop);
  if (first_byte == 0) first_byte = receive_by_curl(permit, range, stop);
  if (done_ - start_ != expected_)
    throw HttpFailure{.reason = "the body ended after " + std::to_string(done_ - start_) + " of " +
                                std::to_string(expected_) + " bytes",
                      .transient = true};
  const double seconds = std::chrono::duration<double>(Clock::now() - begun).count();
  if (done_ > start_ && seconds > 0)
    typical_.note_rate(static_cast<double>(done_ - start_) / seconds);
  if (first_byte > 0) typical_.note_first_byte(first_byte);
}

double RangeFetch::receive_directly(HttpClient::Permit& permit, const std::string& range,
                                    const std::stop_token& stop) {
  if (nbytes_ < client_.options.direct_nbytes) return 0;
  if (client_.indirect_reads.load() > 0) {
    client_.indirect_reads.fetch_sub(1);
    return 0;
  }
  const HttpEndpoint::Target& target = *permit.target;
  const HttpRequest request{&target.url, target.is_home,       range,
                            conditions_, target.headers.get(), lagged_ > 0};
  try {
    const DirectOutcome outcome = direct_read(
        permit.connection->carrier().socket,
        {client_.options, request, [&](const ResponseHead& head) { accept(head); }, into_,
         [&](uint64_t nbytes) { done_ += nbytes; }, [&] { meanwhile(); }, client_.counters},
        stop);
    if (outcome.odd) client_.indirect_reads.store(kIndirectReads);
    return outcome.done ? std::max(outcome.to_first_byte.count(), 1e-9) : 0;
  } catch (const HttpFailure& failure) {
    // There may be another address by now, or other headers.
    if (!client_.refused(permit, failure, stop) || done_ > start_) throw;
    return 0;
  }
}

double RangeFetch::receive_by_curl(HttpClient::Permit& permit, const std::string& range,
                                   const std::stop_token& stop) {
  const auto accept_here = [&](const ResponseHead& head) -> BodySink* {
    accept(head);
    return this;
  };
  const auto exchange =
      client_.start(permit, range, conditions_, accept_here, deadline_, stop, lagged_ > 0);
  drive(permit.connection->carrier().curl, stop, [&] {
    meanwhile();
    return exchange->check();
  });
  return (exchange->time_to_first_byte() - exchange->time_to_connect()).count();
}

}  // namespace tensorizer::io
