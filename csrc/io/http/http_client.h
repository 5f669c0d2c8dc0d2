// Requests for one object, or of one uploader: sent along redirects, over connections that the
// whole process shares, and repeated where they fail for a passing reason.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <stop_token>
#include <utility>

#include "io/http/http_endpoint.h"
#include "io/http/http_exchange.h"
#include "io/http/http_options.h"
#include "io/http/http_reactor.h"
#include "io/http/http_url.h"

namespace tensorizer::io {

// What the requests of one source or of one uploader share. Safe from many threads.
struct HttpSender {
  // `fixed`: see ConnectionLimit.
  HttpSender(const HttpOptions& http_options, unsigned fixed)
      : options(http_options), places(fixed, options.max_connections) {}

  // Sends `request`, and follows redirects, to `led_to`, until a head was accepted; the caller goes
  // on with the exchange. Throws HttpFailure, Errc::cancelled. REQUIRES: the caller has a place.
  std::unique_ptr<HttpExchange> send(HttpRequest request, const HttpExchange::Accept& accept,
                                     const std::stop_token& stop, std::optional<HttpUrl>& led_to);

  const HttpOptions options;
  HttpCounters counters;  // bytes: what came, or what was sent, repetitions included
  HttpPlaces places;
};

// What the parts of one HttpSource share. Safe from many threads.
struct HttpClient : HttpSender {
  HttpClient(HttpAddress address, const HttpOptions& http_options)
      : HttpSender(http_options, http_options.connections),
        endpoint(std::move(address), options.header_provider) {}

  // Sends `request` to where the object is now. Throws what send() throws, and what renew() throws.
  // REQUIRES: the caller has `place`.
  std::unique_ptr<HttpExchange> start(const HttpPlace& place, const HttpRequest& request,
                                      const HttpExchange::Accept& accept,
                                      const std::stop_token& stop);

  HttpEndpoint endpoint;
};

// Repeats `attempt` until it returns, as the policy of `options` has it, and turns the last failure
// into an Error. `attempt` returns nothing and throws HttpFailure; `progress` says how many bytes
// all tries together brought. `earlier`, if not null, is the failure of a try that was made before.
void with_http_retries(const HttpOptions& options, const HttpCounters& counters,
                       const std::function<void()>& attempt,
                       const std::function<uint64_t()>& progress,
                       const std::function<Error(const HttpFailure&, int tries)>& describe,
                       const std::stop_token& stop, const HttpFailure* earlier = nullptr);

}  // namespace tensorizer::io
