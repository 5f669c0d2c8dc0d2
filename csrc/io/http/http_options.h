// Every setting of HTTP requests; tensorizer/_io/options.py documents them for users and has
// the same defaults.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "core/sync.h"
#include "io/curl/curl_trust.h"
#include "io/http/http_message.h"
#include "io/retry.h"

namespace tensorizer::io {

using HttpHeaderProvider = std::function<HttpHeaderList()>;

// The trust anchors of the system, found when they are first needed. Safe from many threads.
class LateTrust {
 public:
  explicit LateTrust(std::function<CurlTrust()> find) : find_(std::move(find)) {}

  // Throws what the search throws; the next call searches again.
  CurlTrust get() {
    {
      MutexLock lock(mutex_);
      if (found_) return *found_;
    }
    CurlTrust found = find_();  // without the lock: it may wait for the interpreter
    MutexLock lock(mutex_);
    found_ = found;
    return found;
  }

 private:
  const std::function<CurlTrust()> find_;
  Mutex mutex_;
  std::optional<CurlTrust> found_ GUARDED_BY(mutex_);
};

enum class HttpVersion { automatic, http1, http2 };

inline constexpr uint64_t kNeverDirect = uint64_t{1} << 63;

struct HttpOptions {
  // Extra request headers. Sent to the origin of the URL only, never to where a redirect leads on
  // another host.
  HttpHeaderList headers;
  // Further ones, for headers that expire: asked when the first request is sent, once a minute, and
  // when a server answers 401 or 403. Never called by two threads at the same time for one source.
  HttpHeaderProvider header_provider;
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

  // Requests at the same time: see ConnectionCount; to one host, all of the process together.
  unsigned connections = 0;
  unsigned max_connections = 64;
  // Bytes of the first request, kept in memory, and of each later one.
  uint64_t head_nbytes = uint64_t{1} << 20;
  uint64_t unit_nbytes = uint64_t{8} << 20;
  // Reads of at least this many bytes go over HTTP/1.1 in clear from the socket into their
  // destination; smaller ones gain less than the further connection costs, and use a socket that is
  // there. Whoever sets this knows whether the environment names a proxy, which only libcurl speaks
  // to: kNeverDirect.
  uint64_t direct_nbytes = uint64_t{256} << 10;
  // A body that takes four times as long as others do, and this time at least, is given up once;
  // what it has not brought is asked for on a new connection. Zero for never.
  std::chrono::milliseconds hedge_after{1'000};

  HttpVersion version = HttpVersion::automatic;
  CurlTrust trust;
  // In place of `trust`, where only a redirect may lead to https.
  std::shared_ptr<LateTrust> late_trust;
  // Whether there may be a proxy of https before a server in clear.
  bool clear_needs_trust = true;
  std::optional<std::string> proxy;     // nullopt: http_proxy and friends, as libcurl reads them
  std::optional<std::string> no_proxy;  // likewise

  // The trust of a connection to a server. Throws what late_trust throws.
  CurlTrust trust_to(bool https) const {
    if (!https && !clear_needs_trust) return CurlTrust::in_clear();
    return https && late_trust ? late_trust->get() : trust;
  }

  // Equal where connections may be used by either.
  std::string connection_key() const {
    return (late_trust ? "late" : trust.key()) + '\n' + proxy.value_or("\t") + '\n' +
           no_proxy.value_or("\t") + '\n' + std::to_string(static_cast<int>(version)) +
           (direct_nbytes < kNeverDirect ? " or sockets" : "");
  }
};

}  // namespace tensorizer::io
