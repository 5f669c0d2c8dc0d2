// Every setting of HTTP requests; tensorizer/streams/options.py documents them for users and has
// the same defaults.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "io/retry.h"

namespace tensorizer::io {

enum class HttpVersion { automatic, http1, http2 };

struct HttpOptions {
  // Extra request headers. Sent to the origin of the URL only, never to where a redirect leads on
  // another host.
  std::vector<std::pair<std::string, std::string>> headers;
  std::string user_agent = "Tensorizer";

  std::chrono::milliseconds connect_timeout{10'000};
  // A request that brings less than min_bytes_per_second over this time has stalled, and is tried
  // again.
  std::chrono::milliseconds stall_timeout{30'000};
  uint64_t min_bytes_per_second = 1024;
  // For one read with all its tries; zero for no limit.
  std::chrono::milliseconds total_timeout{0};
  RetryPolicy retry;
  int max_redirects = 10;

  // Connections at the same time: `connections` if not zero, else as many as help, never above
  // max_connections.
  unsigned connections = 0;
  unsigned max_connections = 64;
  // Bytes of the first request, kept in memory, and of each later one.
  uint64_t head_nbytes = uint64_t{1} << 20;
  uint64_t unit_nbytes = uint64_t{8} << 20;
  // A read that is much slower than its predecessors is asked again on another connection after
  // this time, when connections are idle; zero for never.
  std::chrono::milliseconds hedge_after{2'000};

  HttpVersion version = HttpVersion::automatic;
  std::string ca_file;  // empty: libcurl's default
  std::string ca_path;
  bool verify_peer = true;
  std::optional<std::string> proxy;     // nullopt: http_proxy and friends, as libcurl reads them
  std::optional<std::string> no_proxy;  // likewise
};

}  // namespace tensorizer::io
