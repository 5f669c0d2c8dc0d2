#include "io/http/http_put.h"

#include <exception>
#include <optional>
#include <utility>

namespace tensorizer::io {
namespace {

// Takes the body of the answer and forgets it.
class NullSink final : public BodySink {
 public:
  void put(std::span<const std::byte>) override {}
};

struct PutTarget {
  HttpUrl url;
  std::vector<std::string> header_lines;
  HttpHeaderList further_headers;
};

// Throws HttpFailure where it has worked before, so that it may work again.
PutTarget target_of(const HttpUploader& uploader, const HttpPut& put) {
  try {
    const auto& provider = uploader.options.header_provider;
    HttpPut::Target target = put.target();
    return {HttpUrl::parse(target.url), std::move(target.header_lines),
            provider ? provider() : HttpHeaderList()};
  } catch (...) {
    if (!uploader.counters.answered.load()) throw;
    throw not_renewed(std::current_exception());
  }
}

// One try, along redirects (S3 sends 307 to the region of a bucket).
ResponseHead put_once(HttpUploader& uploader, const HttpPut& put, const PutTarget& target,
                      const HttpDeadline& deadline, const std::stop_token& stop) {
  const HttpUrl& home = target.url;
  HttpUrl url = home;
  const UniqueHttpPermit permit = uploader.connections.enter(home.origin, stop);
  CurlDriver& driver = permit->carrier().curl;
  NullSink sink;
  const auto accept = [&](const ResponseHead& head) -> BodySink* {
    if (head.status == 416) throw failure_of_status(head, {});
    return &sink;
  };
  for (int hops = 0;; ++hops) {
    const bool is_home = url.origin == home.origin;
    HttpRequest request{&url, is_home, "", {}, &target.further_headers, false, put.body};
    if (is_home) request.header_lines = target.header_lines;
    HttpExchange exchange(driver, uploader.options, request, accept, uploader.counters);
    drive(driver, stop, [&] {
      deadline.check();
      return exchange.check();
    });
    if (exchange.accepted()) return exchange.head();
    const ResponseHead& head = exchange.head();
    if (head.status != 307 && head.status != 308)  // those would turn a PUT into a GET
      throw HttpFailure{.reason = "a redirect that is not followed (" + head.status_line + ")",
                        .hint = "check endpoint and region",
                        .status = head.status};
    url = next_hop(uploader.options, exchange, url, hops);
  }
}

}  // namespace

ResponseHead http_put(HttpUploader& uploader, const HttpPut& put, const std::stop_token& stop) {
  const HttpDeadline deadline(uploader.options);
  ResponseHead response;
  std::string name = put.display_name;
  with_retries(
      uploader.options, uploader.counters, deadline,
      [&] {
        while (true) {
          const PutTarget target = target_of(uploader, put);
          if (put.display_name.empty()) name = target.url.shown;
          try {
            response = put_once(uploader, put, target, deadline, stop);
            return;
          } catch (const HttpFailure& failure) {
            if (failure.transient || !put.adapt || !put.adapt(failure)) throw;
          }
        }
      },
      [] { return uint64_t{0}; },
      [&](const HttpFailure& failure, int tries) {
        return to_error(failure, "Failed to write", name, tries, std::nullopt);
      },
      stop);
  return response;
}

}  // namespace tensorizer::io
