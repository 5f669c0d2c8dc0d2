#include "io/http/http_range_fetch.h"

#include <algorithm>
#include <string>
#include <vector>

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
  Part(const RangeFetch& fetch, uint64_t start)
      : request_{fetch.offset_ + start, fetch.nbytes_ - start, &fetch.known_, false},
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

  std::string range() const { return range_text(request_.first, request_.nbytes); }
  HttpExchange::Accept acceptor() {
    return [this](const ResponseHead& head) { return accept(head); };
  }
  // Bytes of the whole fetch that are in place, if all before `start` are.
  uint64_t position() const noexcept { return start_ + (exchange ? exchange->received() : 0); }
  // True at the end of the response; throws HttpFailure if it is incomplete.
  bool check() const {
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
  const RangeRequest request_;
  const uint64_t start_;
  ScatterCursor into_;
  uint64_t expected_ = 0;

 public:
  // Last, so that it dies first: until then it may write.
  std::unique_ptr<HttpExchange> exchange;
};

uint64_t RangeFetch::run(const std::stop_token& stop, const HttpFailure* earlier) {
  const ConnectionGate::Ticket ticket = client_.gate.enter(stop);
  const HttpDeadline deadline(client_.options);
  with_retries(
      client_.options, deadline,
      [&] {
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
  const CurlLanePool::Lease lane = client_.lanes.take();
  const uint64_t start = done_;
  const Clock::time_point started = Clock::now();
  Part first(*this, start);
  std::unique_ptr<Part> second;
  // Both parts write the same bytes to the same places, from this thread alone.
  const auto note_progress = [&] {
    done_ = std::max(done_, first.position());
    if (second) done_ = std::max(done_, second->position());
  };
  bool hedged = false;
  try {
    first.exchange =
        client_.start(*lane, first.range(), conditions(known_), first.acceptor(), deadline, stop);
    Part* leading = &first;
    drive(*lane, stop, [&] {
      deadline.check();
      if (second && leading == &first) {
        try {
          if (second->check()) return true;
        } catch (const HttpFailure&) {
          note_progress();
          second.reset();  // the first goes on alone
        }
      }
      try {
        if (leading->check()) return true;
      } catch (const HttpFailure&) {
        if (!second || leading == second.get()) throw;
        note_progress();
        leading = second.get();
      }
      if (!hedged && hedge_is_due(started, leading->exchange->received())) {
        hedged = true;
        note_progress();  // what is there is not asked for again
        second = start_hedge(*lane);
      }
      return false;
    });
    note_progress();
  } catch (const HttpFailure& failure) {
    note_progress();
    // An object of unknown size ends where its server says that there is no more.
    if (failure.status == 416 && !known_.size) {
      at_end_ = true;
      return;
    }
    throw;
  }
  const double seconds = std::chrono::duration<double>(Clock::now() - started).count();
  if (done_ > start && seconds > 0) typical_.note(static_cast<double>(done_ - start) / seconds);
}

bool RangeFetch::hedge_is_due(Clock::time_point started, uint64_t received) const {
  if (client_.options.hedge_after.count() == 0) return false;
  const auto elapsed = Clock::now() - started;
  if (elapsed < client_.options.hedge_after || !client_.gate.has_idle_place()) return false;
  const double seconds = std::chrono::duration<double>(elapsed).count();
  return static_cast<double>(received) / seconds < typical_.get() / 4;
}

std::unique_ptr<RangeFetch::Part> RangeFetch::start_hedge(CurlLane& lane) const {
  auto part = std::make_unique<Part>(*this, done_);
  // Never waits: where the address must be renewed first, there is no hedge.
  const auto target = client_.endpoint.target_now();
  if (!target) return nullptr;
  const HttpRequest request{&target->url, target->is_home, part->range(), conditions(known_)};
  part->exchange = std::make_unique<HttpExchange>(lane, client_.options, request, part->acceptor(),
                                                  client_.counters);
  return part;
}

}  // namespace tensorizer::io
