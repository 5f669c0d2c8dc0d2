#include "io/http/http_put.h"

#include <exception>
#include <utility>

namespace tensorizer::io {
namespace {

struct PutTarget {
  HttpUrl url;
  HttpHeaderList headers;
};

// Throws HttpFailure where it has worked before, so that it may work again.
PutTarget target_of(const HttpUploader& uploader, const HttpPut& put) {
  try {
    HttpPut::Target target = put.target();
    if (const auto& provider = uploader.options.header_provider)
      for (HttpField& field : provider()) target.headers.push_back(std::move(field));
    return {HttpUrl::parse(target.url, true), std::move(target.headers)};
  } catch (...) {
    if (!uploader.counters.answered.load()) throw;
    throw not_renewed(std::current_exception());
  }
}

// One try, along redirects (S3 sends 307 to the region of a bucket).
HttpResponse put_once(HttpUploader& uploader, const HttpPut& put, const PutTarget& target,
                      const std::stop_token& stop) {
  const HttpPlace place(uploader.places, stop);
  BodySink nowhere;
  const auto accept = [&](const HttpResponse&) { return &nowhere; };
  RedirectedRequest redirected(
      {.url = &target.url, .further_headers = &target.headers, .body = put.body},
      uploader.options.max_redirects);
  for (;;) {
    HttpExchange exchange(uploader.options, redirected.get(), accept, uploader.counters);
    if (exchange.wait_for_response(stop)) {
      exchange.wait_for_body(stop, {}, {});
      return exchange.response();
    }
    redirected.follow(exchange.response());
  }
}

}  // namespace

HttpResponse http_put(HttpUploader& uploader, const HttpPut& put, const std::stop_token& stop) {
  HttpResponse response;
  std::string name = put.display_name;
  with_http_retries(
      uploader.options, uploader.counters,
      [&] {
        while (true) {
          const PutTarget target = target_of(uploader, put);
          if (put.display_name.empty()) name = target.url.shown;
          try {
            response = put_once(uploader, put, target, stop);
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
