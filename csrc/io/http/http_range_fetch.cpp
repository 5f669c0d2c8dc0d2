#include "io/http/http_range_fetch.h"

#include <string>
#include <utility>
#include <vector>

#include "io/http/direct_read.h"

namespace tensorizer::io {
namespace {

using Clock = std::chrono::steady_clock;

}  // namespace

// Where the bytes from done_ on land.
class RangeFetch::Landing final : public BodySink {
 public:
  explicit Landing(RangeFetch& fetch)
      : into(fetch.slices_, fetch.done_),
        range(range_text(fetch.offset_ + fetch.done_, fetch.nbytes_ - fetch.done_)),
        fetch_(fetch),
        request_{fetch.offset_ + fetch.done_, fetch.nbytes_ - fetch.done_, &fetch.known_, false} {
    if (auto line = condition_header(fetch.known_)) conditions.push_back(std::move(*line));
  }

  BodySink* accept(const ResponseHead& head) {
    expected_ = check_response(request_, head).body_nbytes.value_or(0);
    fetch_.deadline_.begin_request([this] { return fetch_.typical_.seconds_for(expected_); },
                                   fetch_.lagged_);
    return this;
  }
  void put(std::span<const std::byte> bytes) override {
    const size_t put = into.put(bytes);
    note(put);
    if (put < bytes.size())
      throw HttpFailure{Errc::io, "the body is longer than the range that was asked for", ""};
  }
  void note(uint64_t nbytes) noexcept {
    fetch_.done_ += nbytes;
    received_ += nbytes;
  }
  void check_complete() const {
    if (received_ == expected_) return;
    throw HttpFailure{.reason = "the body ended after " + std::to_string(received_) + " of " +
                                std::to_string(expected_) + " bytes",
                      .transient = true};
  }

  ScatterCursor into;
  const std::string range;
  std::vector<std::string> conditions;

 private:
  RangeFetch& fetch_;
  const RangeRequest request_;
  uint64_t expected_ = 0;
  uint64_t received_ = 0;
};

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
  const uint64_t start = done_;
  Landing landing(*this);
  double first_byte = receive_directly(permit, landing, stop);
  if (first_byte == 0) first_byte = receive_by_curl(permit, landing, stop);
  landing.check_complete();
  const double seconds = std::chrono::duration<double>(Clock::now() - begun).count();
  if (done_ > start && seconds > 0)
    typical_.note_rate(static_cast<double>(done_ - start) / seconds);
  if (first_byte > 0) typical_.note_first_byte(first_byte);
}

double RangeFetch::receive_directly(HttpClient::Permit& permit, Landing& landing,
                                    const std::stop_token& stop) {
  if (nbytes_ < client_.options.direct_nbytes) return 0;
  if (client_.indirect_reads.load() > 0) {
    client_.indirect_reads.fetch_sub(1);
    return 0;
  }
  const uint64_t start = done_;
  const HttpEndpoint::Target& target = *permit.target;
  const HttpRequest request{&target.url,        target.is_home,       landing.range,
                            landing.conditions, target.headers.get(), lagged_ > 0};
  try {
    const DirectOutcome outcome = direct_read(
        permit.connection->carrier().socket,
        {client_.options, request, [&](const ResponseHead& head) { landing.accept(head); },
         landing.into, [&](uint64_t nbytes) { landing.note(nbytes); }, [&] { deadline_.check(); },
         client_.counters},
        stop);
    if (outcome.odd) client_.indirect_reads.store(kIndirectReads);
    return outcome.done ? std::max(outcome.to_first_byte.count(), 1e-9) : 0;
  } catch (const HttpFailure& failure) {
    // There may be another address by now, or other headers.
    if (!client_.refused(permit, failure, stop) || done_ > start) throw;
    return 0;
  }
}

double RangeFetch::receive_by_curl(HttpClient::Permit& permit, Landing& landing,
                                   const std::stop_token& stop) {
  const auto exchange = client_.start(
      permit, landing.range, landing.conditions,
      [&](const ResponseHead& head) { return landing.accept(head); }, deadline_, stop, lagged_ > 0);
  drive(permit.connection->carrier().curl, stop, [&] {
    deadline_.check();
    return exchange->check();
  });
  return (exchange->time_to_first_byte() - exchange->time_to_connect()).count();
}

}  // namespace tensorizer::io
