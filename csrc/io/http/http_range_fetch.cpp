#include "io/http/http_range_fetch.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "io/http/direct_read.h"

namespace tensorizer::io {
namespace {

using Clock = std::chrono::steady_clock;

std::string range_text(uint64_t first, uint64_t nbytes) {
  return std::to_string(first) + "-" + std::to_string(first + nbytes - 1);
}

std::vector<std::string> conditions(const ResourceIdentity& known) {
  std::vector<std::string> lines;
  if (auto line = condition_header(known)) lines.push_back(std::move(*line));
  return lines;
}

}  // namespace

// One request for the bytes from `start` on, and the place where they land.
class RangeFetch::Part final : public BodySink {
 public:
  Part(RangeFetch& fetch, uint64_t start)
      : fetch_(fetch),
        request_{fetch.offset_ + start, fetch.nbytes_ - start, &fetch.known_, false},
        start_(start),
        into_(fetch.slices_, start) {}

  void put(std::span<const std::byte> bytes) override {
    if (into_.put(bytes) == bytes.size()) return;
    throw HttpFailure{Errc::io, "the body is longer than the range that was asked for", ""};
  }

  BodySink* accept(const ResponseHead& head) {
    expected_ = check_response(request_, head).body_nbytes.value_or(0);
    return this;
  }

  // Asks for the range, straight from the socket.
  void start_direct(CurlLane& lane, const HttpEndpoint::Target& target) {
    HttpClient& client = fetch_.client_;
    const HttpRequest request{&target.url, target.is_home, range(), conditions(fetch_.known_),
                              target.headers.get()};
    direct_ = DirectRead::begin(
        lane, client.options, request, [this](const ResponseHead& head) { accept(head); }, into_,
        client.counters);
  }
  bool is_direct() const noexcept { return direct_ != nullptr; }
  // libcurl is to send the request again.
  bool is_unfit() const noexcept { return unfit_; }
  void end_direct() noexcept { direct_.reset(); }

  std::string range() const { return range_text(request_.first, request_.nbytes); }
  HttpExchange::Accept acceptor() {
    return [this](const ResponseHead& head) { return accept(head); };
  }
  // Bytes of the whole fetch that are in place, if all before `start` are.
  uint64_t position() const noexcept {
    return start_ + (direct_ ? direct_->received() : exchange ? exchange->received() : 0);
  }
  double seconds_to_first_byte() const noexcept {
    if (direct_) return direct_->time_to_first_byte().count();
    if (!exchange) return 0;
    return (exchange->time_to_first_byte() - exchange->time_to_connect()).count();
  }
  // True at the end of the response; throws HttpFailure if it is incomplete.
  bool check() {
    if (direct_) {
      const DirectRead::Outcome outcome = direct_->check();
      unfit_ = outcome == DirectRead::Outcome::unfit;
      return outcome != DirectRead::Outcome::running;
    }
    if (!exchange->check()) return false;
    if (!exchange->accepted()) throw HttpFailure{Errc::io, "a redirect in place of the bytes", ""};
    if (exchange->received() == expected_) return true;
    HttpFailure failure{Errc::io,
                        "the body ended after " + std::to_string(exchange->received()) + " of " +
                            std::to_string(expected_) + " bytes",
                        ""};
    failure.transient = true;
    throw failure;
  }

 private:
  RangeFetch& fetch_;
  const RangeRequest request_;
  const uint64_t start_;
  ScatterCursor into_;
  uint64_t expected_ = 0;
  bool unfit_ = false;
  std::unique_ptr<DirectRead> direct_;

 public:
  // Last, so that it dies first: until then it may write.
  std::unique_ptr<HttpExchange> exchange;
};

// The request, and another one for the same bytes if it lags: the faster one wins. Both write the
// same bytes to the same places, from this thread alone.
class RangeFetch::Race {
 public:
  Race(RangeFetch& fetch, CurlLane& lane)
      : fetch_(fetch), lane_(lane), started_(Clock::now()), first_(fetch, fetch.done_) {}

  void run(const HttpDeadline& deadline, const std::stop_token& stop) {
    if (is_read_directly(deadline, stop)) return;
    try {
      first_.exchange =
          fetch_.client_.start(lane_, first_.range(), conditions(fetch_.known_), first_.acceptor(),
                               deadline, stop, [this] { return step(); });
      if (!first_.exchange) return;  // the second was faster
    } catch (const HttpFailure&) {
      if (!second_) throw;
      first_has_failed_ = true;
    }
    drive(lane_, stop, [&] {
      deadline.check();
      return step();
    });
  }

  // Bytes of the fetch that are in place.
  uint64_t position() const noexcept {
    return std::max(first_.position(), second_ ? second_->position() : kept_);
  }
  Clock::time_point started() const noexcept { return started_; }
  double seconds_to_first_byte() const { return first_.seconds_to_first_byte(); }

 private:
  // False where libcurl has to do it.
  bool is_read_directly(const HttpDeadline& deadline, const std::stop_token& stop) {
    HttpClient& client = fetch_.client_;
    if (fetch_.nbytes_ < client.options.direct_nbytes) return false;
    if (client.direct_is_unfit.load(std::memory_order_relaxed)) return false;
    const HttpEndpoint::Target target = client.endpoint.target(stop);
    first_.start_direct(lane_, target);
    if (!first_.is_direct()) return false;
    try {
      drive(lane_, stop, [&] {
        deadline.check();
        return step();
      });
    } catch (const HttpFailure& failure) {
      if (failure.status == 429 || failure.status == 503) client.gate.note_overload();
      if (first_.position() > fetch_.done_ || !client.endpoint.refused(target, failure.status))
        throw;
      first_.end_direct();
      return false;  // there is another address, or there are other headers
    }
    if (!first_.is_unfit() || second_is_complete_) return true;
    client.direct_is_unfit.store(true, std::memory_order_relaxed);
    first_.end_direct();
    return false;
  }

  // True when one of the two is complete; throws HttpFailure when none is left.
  bool step() {
    if (second_) {
      try {
        if (second_->check()) return second_is_complete_ = true;
      } catch (const HttpFailure&) {
        if (first_has_failed_) throw;
        kept_ = std::max(kept_, second_->position());
        second_.reset();  // the first goes on alone
      }
    }
    if ((first_.exchange || first_.is_direct()) && !first_has_failed_) {
      try {
        if (first_.check()) return true;
      } catch (const HttpFailure&) {
        if (!second_) throw;
        first_has_failed_ = true;
      }
    }
    if (!hedged_ && second_is_due()) start_second();
    return false;
  }

  bool second_is_due() const {
    const HttpOptions& options = fetch_.client_.options;
    const auto elapsed = Clock::now() - started_;
    if (options.hedge_after.count() == 0 || elapsed < options.hedge_after) return false;
    const double seconds = std::chrono::duration<double>(elapsed).count();
    const uint64_t received = position() - fetch_.done_;
    if (received == 0) return seconds > 4 * fetch_.typical_.first_byte();
    return static_cast<double>(received) / seconds < fetch_.typical_.rate() / 4;
  }

  void start_second() {
    // What is there is not asked for again.
    auto part = std::make_unique<Part>(fetch_, position());
    part->exchange = fetch_.client_.start_second(lane_, part->range(), conditions(fetch_.known_),
                                                 part->acceptor());
    if (!part->exchange) return;
    hedged_ = true;
    second_ = std::move(part);
  }

  RangeFetch& fetch_;
  CurlLane& lane_;
  const Clock::time_point started_;
  Part first_;
  std::unique_ptr<Part> second_;
  uint64_t kept_ = 0;  // bytes in place thanks to a second one that has failed
  bool hedged_ = false;
  bool first_has_failed_ = false;
  bool second_is_complete_ = false;
};

uint64_t RangeFetch::run(const std::stop_token& stop, const HttpFailure* earlier) {
  HttpDeadline deadline(client_.options);
  bool waited = false;
  with_retries(
      client_.options, client_.counters, deadline,
      [&] {
        // Not kept between tries: who pauses leaves the place to others.
        const HttpClient::Permit permit = client_.enter(stop);
        if (!std::exchange(waited, true)) deadline.restart();
        while (done_ < nbytes_ && !at_end_) attempt(deadline, stop);
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

void RangeFetch::attempt(const HttpDeadline& deadline, const std::stop_token& stop) {
  const HttpConnections::Lease lane = client_.take_lane(stop);
  const uint64_t start = done_;
  Race race(*this, *lane);
  try {
    race.run(deadline, stop);
    done_ = race.position();
  } catch (const HttpFailure& failure) {
    done_ = race.position();
    // An object of unknown size ends where its server says that there is no more.
    if (failure.status == 416 && !known_.size) {
      at_end_ = true;
      return;
    }
    throw;
  }
  const double seconds = std::chrono::duration<double>(Clock::now() - race.started()).count();
  if (done_ > start && seconds > 0)
    typical_.note_rate(static_cast<double>(done_ - start) / seconds);
  if (const double wait = race.seconds_to_first_byte(); wait > 0) typical_.note_first_byte(wait);
}

}  // namespace tensorizer::io
