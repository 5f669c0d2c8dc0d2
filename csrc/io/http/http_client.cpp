#include "io/http/http_client.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "core/error.h"
#include "io/http/direct_read.h"

namespace tensorizer::io {

using Clock = std::chrono::steady_clock;

namespace {

constexpr std::chrono::seconds kHeadersLifetime{60};

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

HttpClient::Permit HttpClient::enter(const std::stop_token& stop, const HttpRequest* for_socket) {
  const HttpEndpoint::SharedTarget target = endpoint.target(stop);
  const bool prefers_socket =
      for_socket != nullptr && can_be_read_directly(options, target->addressed(*for_socket));
  UniqueHttpPermit connection = connections.enter(target->url.origin, prefers_socket, stop);
  return {endpoint.target(stop), std::move(connection)};  // it may have changed meanwhile
}

bool HttpClient::refused(Permit& permit, const HttpFailure& failure, const std::stop_token& stop) {
  if (failure.status == 429 || failure.status == 503)
    connections.count.note_overload(permit.connection->begun(), Clock::now());
  if (!endpoint.refused(*permit.target, failure.status)) return false;
  permit.target = endpoint.target(stop);
  return true;
}

HttpRequest HttpEndpoint::Target::addressed(HttpRequest request) const {
  request.url = &url;
  request.send_credentials = is_home;
  request.further_headers = headers.get();
  return request;
}

std::unique_ptr<HttpExchange> HttpClient::start(Permit& permit, const HttpRequest& request,
                                                const HttpExchange::Accept& accept,
                                                const HttpDeadline& deadline,
                                                const std::stop_token& stop) {
  constexpr int kMaxRefusals = 2;  // a stale redirect, then a stale URL
  for (int refusals = 0;; ++refusals) {
    std::optional<HttpUrl> led_to;
    try {
      auto exchange =
          send(permit.connection, permit.to_target(request), accept, deadline, stop, led_to);
      endpoint.note_answered();
      if (led_to) endpoint.found_at(*permit.target, *led_to);
      return exchange;
    } catch (const HttpFailure& failure) {
      if (refusals < kMaxRefusals && refused(permit, failure, stop)) continue;
      if (refusals < kMaxRefusals || !endpoint.refused(*permit.target, failure.status)) throw;
      // Credentials that are being exchanged come late: renewed again within the time for retries.
      HttpFailure later = failure;
      later.transient = later.transient || endpoint.may_recover();
      throw later;
    }
  }
}

std::unique_ptr<HttpExchange> HttpSender::send(UniqueHttpPermit& permit, HttpRequest request,
                                               const HttpExchange::Accept& accept,
                                               const HttpDeadline& deadline,
                                               const std::stop_token& stop,
                                               std::optional<HttpUrl>& led_to) {
  const HttpUrl& first = *request.url;
  const bool is_home = request.send_credentials;
  for (int hops = 0;; ++hops) {
    if (led_to) request.url = &*led_to;
    request.send_credentials = is_home && request.url->origin == first.origin;
    connections.move(permit, request.url->origin, stop);
    CurlDriver& driver = permit->carrier().curl();
    auto exchange = std::make_unique<HttpExchange>(driver, options, request, accept, counters);
    drive(driver, stop, [&] {
      deadline.check();
      // Accepted first: what goes wrong after that is the caller's, who counts the bytes that came
      // before.
      return exchange->accepted() || exchange->check();
    });
    if (exchange->accepted()) return exchange;
    led_to = next_hop(options, request, exchange->head(), hops);
    if (led_to->origin == first.origin) {  // also by way of another host
      led_to->user = first.user;
      led_to->password = first.password;
    }
  }
}

void with_retries(const HttpOptions& options, const HttpCounters& counters,
                  const HttpDeadline& deadline, const std::function<void()>& attempt,
                  const std::function<uint64_t()>& progress,
                  const std::function<Error(const HttpFailure&, int tries)>& describe,
                  const std::stop_token& stop, const HttpFailure* earlier) {
  RetryState retry(options.retry);
  uint64_t progress_before = progress();
  for (;;) {
    HttpFailure failure;
    if (earlier != nullptr) {
      failure = *std::exchange(earlier, nullptr);
    } else {
      try {
        return attempt();
      } catch (const HttpFailure& caught) {
        failure = caught;
      }
    }
    throw_if_stopped(stop);
    const uint64_t now_at = progress();
    const bool answered = counters.answered.load() || failure.status != 0 || failure.reached;
    const auto delay =
        retry.after_failure({now_at - progress_before, answered, failure.retry_after});
    progress_before = now_at;
    // Another try would wait as long for a server that has never said anything.
    const bool is_mute = failure.silent && !answered;
    if (!failure.transient || !delay || is_mute) {
      if (failure.cause) std::rethrow_exception(failure.cause);
      if (failure.transient) add_hint(failure, is_mute ? RetryEnd::never_answered : retry.end());
      throw describe(failure, retry.failures());
    }
    retry.wait(deadline.bound(*delay), stop);
    try {
      deadline.check();
    } catch (const HttpFailure& late) {
      throw describe(late, retry.failures());
    }
  }
}

std::chrono::milliseconds HttpDeadline::bound(std::chrono::milliseconds delay) const {
  if (limit_.count() == 0) return delay;
  const auto left = start_ + limit_ - Clock::now();
  return std::clamp(std::chrono::ceil<std::chrono::milliseconds>(left),
                    std::chrono::milliseconds(0), delay);
}

void HttpDeadline::check() const {
  if (limit_.count() == 0 || Clock::now() - start_ < limit_) return;
  throw HttpFailure{
      Errc::io, "not done within the total timeout of " + std::to_string(limit_.count()) + " ms",
      "raise total_timeout, or leave it out"};
}

}  // namespace tensorizer::io
