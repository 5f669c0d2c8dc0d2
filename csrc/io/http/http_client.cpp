#include "io/http/http_client.h"

#include <exception>
#include <string>
#include <utility>

#include "core/error.h"

namespace tensorizer::io {
namespace {

void add_hint(HttpFailure& failure, RetryEnd end) {
  if (end == RetryEnd::asked_to_wait)
    failure.hint = "the server asks to wait for " +
                   std::to_string(failure.retry_after->count() / 1000) +
                   " s or more, longer than retry_seconds allows";
  if (end == RetryEnd::never_answered)
    failure.hint += (failure.hint.empty() ? "" : "; ") + std::string(kNeverAnsweredHint);
}

// Where a redirect in answer to `request` leads.
HttpUrl next_hop(const HttpOptions& options, const HttpRequest& request, const ResponseHead& head,
                 int hops) {
  if (request.body && head.status != 307 && head.status != 308)  // those would turn it into a GET
    refuse(head, "a redirect that is not followed", "check endpoint and region");
  const auto location = find_field(head.headers, "location");
  if (hops == options.max_redirects)
    refuse(head, "more than " + std::to_string(hops) + " redirects");
  auto next = request.url->resolve(std::string(*location));
  if (!next)
    refuse(head, "a redirect that is not followed",
           "it leads away from https, or is no http(s) URL");
  return std::move(*next);
}

}  // namespace

std::unique_ptr<HttpExchange> HttpClient::start(const HttpPlace& place, const HttpRequest& request,
                                                const HttpExchange::Accept& accept,
                                                const std::stop_token& stop) {
  constexpr int kMaxRefusals = 2;  // a stale redirect, then a stale URL
  for (int refusals = 0;; ++refusals) {
    const HttpEndpoint::SharedTarget target = endpoint.target(stop);
    std::optional<HttpUrl> led_to;
    try {
      auto exchange = send(target->addressed(request), accept, stop, led_to);
      endpoint.note_answered();
      if (led_to) endpoint.found_at(*target, *led_to);
      return exchange;
    } catch (const HttpFailure& failure) {
      if (failure.status == 429 || failure.status == 503)
        places.limit.note_overload(place.begun(), HttpReactor::Clock::now());
      if (!endpoint.refused(*target, failure.status)) throw;
      if (refusals < kMaxRefusals) continue;
      // Credentials that are being exchanged come late: renewed again within the time for retries.
      HttpFailure later = failure;
      later.transient = later.transient || endpoint.may_recover();
      throw later;
    }
  }
}

std::unique_ptr<HttpExchange> HttpSender::send(HttpRequest request,
                                               const HttpExchange::Accept& accept,
                                               const std::stop_token& stop,
                                               std::optional<HttpUrl>& led_to) {
  const HttpUrl& first = *request.url;
  const bool is_home = request.send_credentials;
  for (int hops = 0;; ++hops) {
    if (led_to) request.url = &*led_to;
    request.send_credentials = is_home && request.url->origin == first.origin;
    auto exchange = std::make_unique<HttpExchange>(options, request, accept, counters);
    exchange->wait_for_head(stop);
    if (exchange->accepted()) return exchange;
    led_to = next_hop(options, request, exchange->head(), hops);
    if (led_to->origin == first.origin) {  // also by way of another host
      led_to->user = first.user;
      led_to->password = first.password;
    }
  }
}

void with_retries(const HttpOptions& options, const HttpCounters& counters,
                  const std::function<void()>& attempt, const std::function<uint64_t()>& progress,
                  const std::function<Error(const HttpFailure&, int tries)>& describe,
                  const std::stop_token& stop, const HttpFailure* earlier) {
  RetryState retry(options.retry);
  uint64_t progress_before = progress();
  for (;;) {
    HttpFailure failure;
    if (earlier != nullptr) {
      failure = *std::exchange(earlier, nullptr);
    } else {
      try {
        return attempt();
      } catch (const HttpFailure& caught) {
        failure = caught;
      }
    }
    throw_if_stopped(stop);
    const uint64_t now_at = progress();
    const bool answered = counters.answered.load() || failure.status != 0 || failure.reached;
    const auto delay =
        retry.after_failure({now_at - progress_before, answered, failure.retry_after});
    progress_before = now_at;
    // Another try would wait as long for a server that has never said anything.
    const bool is_mute = failure.silent && !answered;
    if (!failure.transient || !delay || is_mute) {
      if (failure.cause) std::rethrow_exception(failure.cause);
      if (failure.transient) add_hint(failure, is_mute ? RetryEnd::never_answered : retry.end());
      throw describe(failure, retry.failures());
    }
    retry.wait(*delay, stop);
  }
}

}  // namespace tensorizer::io
