#include "io/http/http_client.h"

#include <exception>
#include <utility>

#include "core/stop.h"

namespace tensorizer::io {

using Clock = std::chrono::steady_clock;

HttpEndpoint::HttpEndpoint(HttpAddress address) : address_(std::move(address)) {
  MutexLock lock(mutex_);
  name_ = address_.display_name;
  if (address_.url.empty() && address_.renew) return;
  home_ = HttpUrl::parse(address_.url);
  renewed_at_ = Clock::now();
  if (name_.empty()) name_ = home_->shown();
}

std::string HttpEndpoint::name() const {
  MutexLock lock(mutex_);
  return name_;
}

std::optional<HttpEndpoint::Target> HttpEndpoint::current() const {
  const bool too_old = address_.renew && address_.lifetime.count() > 0 &&
                       Clock::now() - renewed_at_ >= address_.lifetime;
  if (!home_ || too_old) return std::nullopt;
  if (!resolved_) return Target{*home_, true, generation_, false};
  return Target{*resolved_, resolved_->origin() == home_->origin(), generation_, true};
}

std::optional<HttpEndpoint::Target> HttpEndpoint::target_now() const {
  MutexLock lock(mutex_);
  return renewing_ ? std::nullopt : current();
}

HttpEndpoint::Target HttpEndpoint::target(const std::stop_token& stop) {
  {
    MutexLock lock(mutex_);
    if (!renewed_.wait(mutex_, stop, [this]() REQUIRES_LOCK(mutex_) { return !renewing_; }))
      throw Error(Errc::cancelled, "cancelled");
    if (auto target = current()) return std::move(*target);
    renewing_ = true;
  }
  // Outside the lock: renew() may need the interpreter.
  std::exception_ptr error;
  std::optional<HttpUrl> fresh;
  try {
    fresh = HttpUrl::parse(address_.renew());
  } catch (...) {
    error = std::current_exception();
  }
  MutexLock lock(mutex_);
  renewing_ = false;
  renewed_.notify_all();
  if (error) std::rethrow_exception(error);
  home_ = std::move(fresh);
  resolved_.reset();
  renewed_at_ = Clock::now();
  ++generation_;
  if (name_.empty()) name_ = home_->shown();
  return Target{*home_, true, generation_, false};
}

void HttpEndpoint::found_at(const Target& from, const HttpUrl& to) {
  MutexLock lock(mutex_);
  if (from.generation == generation_) resolved_ = to;
}

bool HttpEndpoint::refused(const Target& target, int status) {
  // What servers say to an expired or revoked URL.
  if (status != 400 && status != 401 && status != 403 && status != 404 && status != 410)
    return false;
  MutexLock lock(mutex_);
  if (target.generation != generation_) return true;  // another thread has seen it before
  if (target.is_redirect) {
    resolved_.reset();
  } else if (address_.renew && (status == 400 || status == 401 || status == 403)) {
    home_.reset();
  } else {
    return false;
  }
  ++generation_;
  return true;
}

std::unique_ptr<HttpExchange> HttpClient::start(CurlLane& lane, const std::string& range,
                                                const std::vector<std::string>& header_lines,
                                                const HttpExchange::Accept& accept,
                                                const HttpDeadline& deadline,
                                                const std::stop_token& stop) {
  constexpr int kMaxRefusals = 2;  // a stale redirect, then a stale URL
  for (int refusals = 0;; ++refusals) {
    const HttpEndpoint::Target target = endpoint.target(stop);
    HttpUrl url = target.url;
    try {
      for (int hops = 0;; ++hops) {
        const bool is_home = target.is_home && url.origin() == target.url.origin();
        const HttpRequest request{&url, is_home, range, header_lines};
        auto exchange = std::make_unique<HttpExchange>(lane, options, request, accept, counters);
        drive(lane, stop, [&] {
          deadline.check();
          // Accepted first: what goes wrong after that is the caller's, who counts the bytes that
          // came before.
          return exchange->accepted() || exchange->check();
        });
        if (exchange->accepted()) {
          if (hops > 0) endpoint.found_at(target, url);
          return exchange;
        }
        const auto location = exchange->location();
        const ResponseHead& head = exchange->head();
        if (!location)
          throw HttpFailure{Errc::io, "a redirect without a target (" + head.status_line + ")", "",
                            head.status};
        if (hops == options.max_redirects)
          throw HttpFailure{
              Errc::io,
              "more than " + std::to_string(hops) + " redirects (" + head.status_line + ")", "",
              head.status};
        auto next = url.resolve(*location);
        if (!next)
          throw HttpFailure{Errc::io, "a redirect that is not followed (" + head.status_line + ")",
                            "it leads away from https, or is no http(s) URL", head.status};
        url = std::move(*next);
      }
    } catch (const HttpFailure& failure) {
      if (refusals == kMaxRefusals || !endpoint.refused(target, failure.status)) throw;
    }
  }
}

void with_retries(const HttpOptions& options, const HttpDeadline& deadline,
                  const std::function<void()>& attempt, const std::function<uint64_t()>& progress,
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
    const auto delay = retry.after_failure(Clock::now(), now_at - progress_before, retry_chance(),
                                           failure.retry_after);
    progress_before = now_at;
    if (!failure.transient || !delay) {
      if (failure.transient && failure.retry_after > options.retry.window)
        failure.hint = "the server asks to wait for " +
                       std::to_string(failure.retry_after->count() / 1000) +
                       " s or more, longer than retry_seconds allows";
      throw describe(failure, retry.failures());
    }
    sleep_unless_stopped(*delay, stop);
    try {
      deadline.check();
    } catch (const HttpFailure& late) {
      throw describe(late, retry.failures());
    }
  }
}

void HttpDeadline::check() const {
  if (limit_.count() == 0 || Clock::now() - start_ < limit_) return;
  throw HttpFailure{
      Errc::io, "not done within the total timeout of " + std::to_string(limit_.count()) + " ms",
      "raise total_timeout, or leave it out"};
}

}  // namespace tensorizer::io
