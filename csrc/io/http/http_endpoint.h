// Addressing: where requests for one object go now, along redirects and through renewed URLs.
// Internally locked.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <stop_token>
#include <string>

#include "core/sync.h"
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

  // Where to send the next request. May call renew() and the provider. If they have worked before,
  // an exception of theirs becomes an HttpFailure that may be tried again.
  SharedTarget target(const std::stop_token& stop);

  // The object was found at `to`, so later requests go there at once.
  void found_at(const Target& from, const HttpUrl& to);

  // The server refused `target` with `status`: true when a request to the new target() may do
  // better.
  bool refused(const Target& target, int status);

  // A request was answered as it should be: later failures of a renewal may pass.
  void note_answered();
  // Whether a target that is refused now may be accepted later: it was accepted before, and can be
  // renewed.
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

}  // namespace tensorizer::io
