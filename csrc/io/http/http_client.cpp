#include "io/http/http_client.h"

#include <exception>
#include <string>
#include <utility>

#include "core/error.h"

namespace tensorizer::io {

HttpFailure with_hint(HttpFailure failure, RetryEnd end) {
  if (end == RetryEnd::asked_to_wait)
    failure.hint = "the server asks to wait for " +
                   std::to_string(failure.retry_after->count() / 1000) +
                   " s or more, longer than retry_seconds allows";
  if (end == RetryEnd::never_answered)
    failure.hint += (failure.hint.empty() ? "" : "; ") + std::string(kNeverAnsweredHint);
  return failure;
}

void RedirectedRequest::follow(const HttpResponse& response) {
  if (request_.body && response.status != 307 &&
      response.status != 308)  // those would turn it into a GET
    refuse(response, "a redirect that is not followed", "check endpoint and region");
  const auto location = find_field(response.headers, "location");
  if (hops_ == max_redirects_)
    refuse(response, "more than " + std::to_string(hops_) + " redirects");
  auto next = request_.url->resolve(std::string(*location));
  if (!next)
    refuse(response, "a redirect that is not followed",
           "it leads away from https, or is no http(s) URL");
  ++hops_;
  led_to_ = std::move(*next);
  request_.url = &*led_to_;
  request_.send_credentials = is_home_ && led_to_->origin == first_.origin;
  if (led_to_->origin == first_.origin) {  // also by way of another host
    led_to_->user = first_.user;
    led_to_->password = first_.password;
  }
}

std::unique_ptr<HttpExchange> HttpClient::start(const HttpPlace& place, const HttpRequest& request,
                                                const HttpExchange::Accept& accept,
                                                const std::stop_token& stop) {
  constexpr int kMaxRefusals = 2;  // a stale redirect, then a stale URL
  for (int refusals = 0;; ++refusals) {
    const HttpEndpoint::SharedTarget target = endpoint.target(stop);
    RedirectedRequest redirected(target->addressed(request), options.max_redirects);
    try {
      auto exchange = std::make_unique<HttpExchange>(options, redirected.get(), accept, counters);
      while (!exchange->wait_for_response(stop)) {
        redirected.follow(exchange->response());
        exchange = std::make_unique<HttpExchange>(options, redirected.get(), accept, counters);
      }
      endpoint.note_answered();
      if (redirected.led_to()) endpoint.found_at(*target, *redirected.led_to());
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

}  // namespace tensorizer::io
