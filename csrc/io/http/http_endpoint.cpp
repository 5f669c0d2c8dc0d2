#include "io/http/http_endpoint.h"

#include <exception>
#include <utility>

#include "core/error.h"

namespace tensorizer::io {

using Clock = std::chrono::steady_clock;

namespace {

constexpr std::chrono::seconds kHeadersLifetime{60};

}  // namespace

HttpEndpoint::HttpEndpoint(HttpAddress address, HttpHeaderProvider provider)
    : address_(std::move(address)), provider_(std::move(provider)) {
  MutexLock lock(mutex_);
  name_ = address_.display_name;
  if (address_.url.empty() && address_.renew) return;
  home_ = HttpUrl::parse(address_.url, address_.renew != nullptr);
  renewed_at_ = Clock::now();
  if (name_.empty()) name_ = home_->shown;
}

std::string HttpEndpoint::name() const {
  MutexLock lock(mutex_);
  return name_;
}

bool HttpEndpoint::url_is_due() const {
  if (!home_) return true;
  return address_.renew && address_.lifetime.count() > 0 &&
         Clock::now() - renewed_at_ >= address_.lifetime;
}

bool HttpEndpoint::headers_are_due() const {
  return provider_ && (!headers_ || Clock::now() - headers_at_ >= kHeadersLifetime);
}

void HttpEndpoint::changed() {
  ++generation_;
  target_.reset();
}

HttpEndpoint::SharedTarget HttpEndpoint::current() {
  if (target_) return target_;
  const HttpUrl& url = resolved_ ? *resolved_ : *home_;
  const bool is_home = url.origin == home_->origin;
  target_ = std::make_shared<const Target>(
      Target{url, headers_, is_home, resolved_.has_value(), generation_});
  return target_;
}

HttpEndpoint::SharedTarget HttpEndpoint::target(const std::stop_token& stop) {
  bool url_due = false;
  bool headers_due = false;
  {
    MutexLock lock(mutex_);
    if (!renewed_.wait(mutex_, stop, [this]() REQUIRES_LOCK(mutex_) { return !*renewing_; }))
      throw Error(Errc::cancelled, "cancelled");
    url_due = url_is_due();
    headers_due = headers_are_due();
    if (!url_due && !headers_due) return current();
    *renewing_ = true;
  }
  // Outside the lock: both may need the interpreter.
  std::exception_ptr error;
  std::optional<HttpUrl> fresh;
  std::shared_ptr<const HttpHeaderList> headers;
  try {
    if (url_due) fresh = HttpUrl::parse(address_.renew(), true);
    if (headers_due) headers = std::make_shared<const HttpHeaderList>(provider_());
  } catch (...) {
    error = std::current_exception();
  }
  MutexLock lock(mutex_);
  *renewing_ = false;
  renewed_.notify_all();
  if (error && !worked_ && !answered_) std::rethrow_exception(error);
  if (error) throw not_renewed(error);
  if (fresh) {
    home_ = std::move(fresh);
    resolved_.reset();
    renewed_at_ = Clock::now();
    if (name_.empty()) name_ = home_->shown;
  }
  if (headers) {
    headers_ = std::move(headers);
    headers_at_ = Clock::now();
  }
  changed();
  worked_ = true;
  return current();
}

void HttpEndpoint::note_answered() {
  MutexLock lock(mutex_);
  answered_ = true;
}

bool HttpEndpoint::may_recover() const {
  MutexLock lock(mutex_);
  return answered_ && (address_.renew || provider_);
}

void HttpEndpoint::found_at(const Target& from, const HttpUrl& to) {
  MutexLock lock(mutex_);
  if (from.generation != generation_) return;
  resolved_ = to;
  target_.reset();
}

bool HttpEndpoint::refused(const Target& target, int status) {
  // What servers say to an expired or revoked URL.
  if (status != 400 && status != 401 && status != 403 && status != 404 && status != 410)
    return false;
  MutexLock lock(mutex_);
  if (target.generation != generation_) return true;  // another thread has seen it before
  const bool is_denied = status == 401 || status == 403;
  bool may_do_better = false;
  if (headers_ && target.is_home && is_denied) {
    headers_.reset();
    may_do_better = true;
  }
  if (target.is_redirect) {
    resolved_.reset();
    may_do_better = true;
  } else if (address_.renew && (status == 400 || is_denied)) {
    home_.reset();
    may_do_better = true;
  }
  if (may_do_better) changed();
  return may_do_better;
}

HttpRequest HttpEndpoint::Target::addressed(HttpRequest request) const {
  request.url = &url;
  request.send_credentials = is_home;
  request.further_headers = headers.get();
  return request;
}

}  // namespace tensorizer::io
