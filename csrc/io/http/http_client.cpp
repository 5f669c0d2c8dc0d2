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

void with_http_retries(const HttpOptions& options, const HttpCounters& counters,
                       const std::function<void()>& attempt,
                       const std::function<uint64_t()>& progress,
                       const std::function<Error(const HttpFailure&, int tries)>& describe,
                       const std::stop_token& stop, const HttpFailure* earlier) {
  uint64_t before = progress();
  with_retries<HttpFailure>(
      options.retry, stop,
      [&] {
        if (earlier != nullptr) throw HttpFailure(*std::exchange(earlier, nullptr));
        attempt();
      },
      [&](const HttpFailure& failure) {
        const uint64_t now_at = progress();
        return FailedTry{
            .progress_nbytes = now_at - std::exchange(before, now_at),
            .answered = counters.answered.load() || failure.status != 0 || failure.reached,
            .retry_after = failure.retry_after,
            .passing = failure.transient,
            .silent = failure.silent};
      },
      [&](const HttpFailure& failure, const RetryState& state) {
        if (failure.cause) std::rethrow_exception(failure.cause);
        HttpFailure told = failure;
        add_hint(told, state.end());
        throw describe(told, state.failures());
      });
}

}  // namespace tensorizer::io
