// Every setting of HTTP requests; tensorizer/_io/http_options.py documents them for users and has
// the same defaults.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "io/curl/curl_trust.h"
#include "io/http/http_message.h"
#include "io/retry.h"

namespace tensorizer::io {

using HttpHeaderProvider = std::function<HttpHeaderList()>;

inline constexpr long kMinBytesPerSecond = 1024;

enum class HttpVersion { automatic, http1, http2 };

struct HttpOptions {
  // Extra request headers. Sent to the origin of the URL only, never to where a redirect leads on
  // another host.
  HttpHeaderList headers;
  // Further ones, for headers that expire: asked when the first request is sent, once a minute, and
  // when a server answers 401 or 403. Never called by two threads at the same time for one source.
  HttpHeaderProvider header_provider;
  std::string user_agent = "Tensorizer";

  std::chrono::milliseconds connect_timeout{10'000};
  // A request that brings less than kMinBytesPerSecond over this time has stalled, and is tried
  // again; libcurl counts whole seconds.
  std::chrono::milliseconds stall_timeout{30'000};
  RetryPolicy retry;
  int max_redirects = 10;

  // Requests at the same time: see ConnectionLimit; those of the whole process together.
  unsigned connections = 0;
  unsigned max_connections = 64;
  // Bytes of the first request, which holds the head of most files and is kept in memory; and of
  // each later one.
  uint64_t head_nbytes = uint64_t{1} << 20;
  uint64_t unit_nbytes = uint64_t{8} << 20;

  HttpVersion version = HttpVersion::automatic;
  CurlTrust trust;
  // Asked before each request over https, in place of `trust`, where only a redirect may lead
  // there.
  std::function<CurlTrust()> find_trust;
  std::optional<std::string> proxy;  // nullopt: http_proxy and friends, as libcurl reads them
};

}  // namespace tensorizer::io
