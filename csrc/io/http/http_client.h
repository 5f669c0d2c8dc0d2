// Requests for one object, or of one uploader: sent along redirects, over connections that the
// whole process shares, and repeated where they fail for a passing reason.
#pragma once

#include <exception>
#include <memory>
#include <optional>
#include <stop_token>
#include <utility>

#include "io/http/http_endpoint.h"
#include "io/http/http_exchange.h"
#include "io/http/http_options.h"
#include "io/http/http_reactor.h"
#include "io/http/http_url.h"
#include "io/retry.h"

namespace tensorizer::io {

// What the requests of one source or of one uploader share. Safe from many threads.
struct HttpSender {
  // `fixed`: see ConnectionLimit.
  HttpSender(const HttpOptions& http_options, unsigned fixed)
      : options(http_options), places(fixed, options.max_connections) {}

  const HttpOptions options;
  HttpCounters counters;  // bytes: what came, or what was sent, repetitions included
  HttpPlaces places;
};

// A request along redirects.
class RedirectedRequest {
 public:
  // `request` borrows its first URL.
  RedirectedRequest(HttpRequest request, int max_redirects)
      : request_(std::move(request)), first_(*request_.url), max_redirects_(max_redirects) {}
  RedirectedRequest(const RedirectedRequest&) = delete;
  RedirectedRequest& operator=(const RedirectedRequest&) = delete;

  // To where the last redirect has led.
  const HttpRequest& get() const noexcept { return request_; }
  // Goes on to where the redirect in `response` leads. Throws HttpFailure if it is not to be
  // followed.
  void follow(const HttpResponse& response);
  const std::optional<HttpUrl>& led_to() const noexcept { return led_to_; }

 private:
  HttpRequest request_;
  const HttpUrl& first_;
  const int max_redirects_;
  const bool is_home_ = request_.send_credentials;
  int hops_ = 0;
  std::optional<HttpUrl> led_to_;
};

// What the parts of one HttpSource share. Safe from many threads.
struct HttpClient : HttpSender {
  HttpClient(HttpAddress address, const HttpOptions& http_options)
      : HttpSender(http_options, http_options.connections),
        endpoint(std::move(address), options.header_provider) {}

  // Sends `request` to where the object is now, and returns when a response was accepted; the
  // caller goes on with the exchange. Throws HttpFailure, Errc::cancelled, and what renew() throws.
  // REQUIRES: the caller has `place`.
  std::unique_ptr<HttpExchange> start(const HttpPlace& place, const HttpRequest& request,
                                      const HttpExchange::Accept& accept,
                                      const std::stop_token& stop);

  HttpEndpoint endpoint;
};

// The failure of the last try, with a hint where the end of the tries has a reason of its own.
HttpFailure with_hint(HttpFailure failure, RetryEnd end);

// Repeats `attempt` until it returns, as the policy of `options` has it, and turns the last failure
// into an Error. `attempt` returns nothing and throws HttpFailure; progress() is the number of
// bytes that all tries together brought; describe(failure, tries) makes the Error. `earlier`, if
// not null, is the failure of a try that was made before.
template <class Attempt, class Progress, class Describe>
void with_http_retries(const HttpOptions& options, const HttpCounters& counters, Attempt&& attempt,
                       Progress&& progress, Describe&& describe, const std::stop_token& stop,
                       const HttpFailure* earlier = nullptr) {
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
        throw describe(with_hint(failure, state.end()), state.failures());
      });
}

}  // namespace tensorizer::io
