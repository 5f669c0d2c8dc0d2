// Addressing: where requests for one object go now, along redirects and through renewed URLs.
// Internally locked.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <stop_token>
#include <string>
#include <utility>

#include "core/sync.h"
#include "io/http/http_connections.h"
#include "io/http/http_exchange.h"
#include "io/http/http_options.h"
#include "io/http/http_url.h"

namespace tensorizer::io {

// Where an object is.
struct HttpAddress {
  std::string url;
  // For URLs that expire (presigned ones): gives a fresh URL of the same object; may throw, may
  // wait, is never called by two threads at the same time. With it, `url` may be empty.
  std::function<std::string()> renew;
  // How long a URL is used before renew() is asked for another; zero: only when the server refuses
  // it.
  std::chrono::seconds lifetime{0};
  // How messages call the object; empty: by URL, without query.
  std::string display_name;
};

class HttpEndpoint {
 public:
  // `provider`, where there is one, gives request headers that expire, under the rules of
  // HttpAddress::renew.
  HttpEndpoint(HttpAddress address, HttpHeaderProvider provider);

  struct Target {
    HttpUrl url;
    std::shared_ptr<const HttpHeaderList> headers;  // of the provider; nullptr where there is none
    bool is_home = true;                            // the origin that may see credentials
    bool is_redirect = false;
    uint64_t generation = 0;

    // `request`, to here; it borrows from this.
    HttpRequest addressed(HttpRequest request) const;
  };
  using SharedTarget = std::shared_ptr<const Target>;

  // Where to send the next request. May call renew() and the provider; what they throw when they
  // have worked before is an HttpFailure that may be tried again.
  SharedTarget target(const std::stop_token& stop);

  // The object was found at `to`, so later requests go there at once.
  void found_at(const Target& from, const HttpUrl& to);

  // The server refused `target` with `status`: true when a request to the new target() may do
  // better.
  bool refused(const Target& target, int status);

  // A request was answered as it should be: what renewal fails at from now on may pass.
  void note_answered();
  // Whether a target that is refused today may be accepted later: it has been, and can be renewed.
  bool may_recover() const;

  // For messages; holds no credentials and no query. Valid after the first target().
  std::string name() const;

 private:
  bool url_is_due() const REQUIRES_LOCK(mutex_);
  bool headers_are_due() const REQUIRES_LOCK(mutex_);
  SharedTarget current() REQUIRES_LOCK(mutex_);
  void changed() REQUIRES_LOCK(mutex_);

  HttpAddress address_;
  HttpHeaderProvider provider_;
  mutable Mutex mutex_;
  CondVar renewed_;
  std::string name_ GUARDED_BY(mutex_);
  std::optional<HttpUrl> home_ GUARDED_BY(mutex_);      // nullopt: to be renewed
  std::optional<HttpUrl> resolved_ GUARDED_BY(mutex_);  // where a redirect has led
  std::chrono::steady_clock::time_point renewed_at_ GUARDED_BY(mutex_);
  std::shared_ptr<const HttpHeaderList> headers_ GUARDED_BY(mutex_);  // nullptr: to be asked for
  std::chrono::steady_clock::time_point headers_at_ GUARDED_BY(mutex_);
  FreshInChild<bool> renewing_ GUARDED_BY(mutex_);
  bool worked_ GUARDED_BY(mutex_) = false;    // renew() and the provider have given something
  bool answered_ GUARDED_BY(mutex_) = false;  // a server has accepted a request
  uint64_t generation_ GUARDED_BY(mutex_) = 0;
  SharedTarget target_ GUARDED_BY(mutex_);  // of all that; nullptr when it has changed
};

// Ends an operation that takes longer than HttpOptions::total_timeout.
class HttpDeadline {
 public:
  using Clock = std::chrono::steady_clock;
  explicit HttpDeadline(const HttpOptions& options) noexcept
      : limit_(options.total_timeout), start_(Clock::now()) {}
  // Throws HttpFailure.
  void check() const;
  void restart() noexcept { start_ = Clock::now(); }
  // `delay`, or what is left if that is less.
  std::chrono::milliseconds bound(std::chrono::milliseconds delay) const;

 private:
  std::chrono::milliseconds limit_;
  Clock::time_point start_;
};

inline constexpr int kIndirectReads = 32;

// What the requests of one source or of one uploader share. Safe from many threads.
struct HttpSender {
  // `fixed`: see ConnectionCount.
  HttpSender(const HttpOptions& http_options, unsigned fixed)
      : options(http_options),
        connections(fixed, options.max_connections, options.connection_key()) {}

  // Sends `request`, and follows redirects, to `led_to`, until a head was accepted; the caller goes
  // on driving the exchange. `permit` becomes one for the host that was reached, and may be empty
  // after an error. Throws HttpFailure, what the deadline throws.
  std::unique_ptr<HttpExchange> send(UniqueHttpPermit& permit, HttpRequest request,
                                     const HttpExchange::Accept& accept,
                                     const HttpDeadline& deadline, const std::stop_token& stop,
                                     std::optional<HttpUrl>& led_to);

  const HttpOptions options;
  HttpCounters counters;  // bytes: what came, or what was sent, repetitions included
  HttpConnections connections;
};

// What the parts of one HttpSource share. Safe from many threads.
struct HttpClient : HttpSender {
  HttpClient(HttpAddress address, const HttpOptions& http_options)
      : HttpSender(http_options, http_options.connections),
        endpoint(std::move(address), options.header_provider) {}

  // Permission for requests: where to, and over what.
  struct Permit {
    HttpEndpoint::SharedTarget target;
    UniqueHttpPermit connection;

    // `request`, to `target`, from which it borrows.
    HttpRequest to_target(HttpRequest request) const {
      return target->addressed(std::move(request));
    }
  };
  // `for_socket`, if not null, is a request for direct_read, as far as it can send it.
  Permit enter(const std::stop_token& stop, const HttpRequest* for_socket = nullptr);

  // Sends `request` to where the object is now. Throws what send() throws, and what renew() throws.
  std::unique_ptr<HttpExchange> start(Permit& permit, const HttpRequest& request,
                                      const HttpExchange::Accept& accept,
                                      const HttpDeadline& deadline, const std::stop_token& stop);
  // The server refused a request to permit.target: true where the target is another one now.
  bool refused(Permit& permit, const HttpFailure& failure, const std::stop_token& stop);

  HttpEndpoint endpoint;
  // Reads that are left to libcurl before direct_read, which did not know how the server answered,
  // is tried again.
  std::atomic<int> indirect_reads{0};
};

// Repeats `attempt` until it returns, as the policy of `options` has it, and turns the last failure
// into an Error. `attempt` returns nothing and throws HttpFailure; `progress` says how many bytes
// all tries together brought. `earlier`, if not null, is the failure of a try that was made before.
void with_retries(const HttpOptions& options, const HttpCounters& counters,
                  const HttpDeadline& deadline, const std::function<void()>& attempt,
                  const std::function<uint64_t()>& progress,
                  const std::function<Error(const HttpFailure&, int tries)>& describe,
                  const std::stop_token& stop, const HttpFailure* earlier = nullptr);

}  // namespace tensorizer::io
