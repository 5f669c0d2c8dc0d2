// Uploads: one PUT of bytes in memory, repeated whole where it fails for a passing reason.
#pragma once

#include <functional>
#include <stop_token>
#include <string>

#include "io/buffers.h"
#include "io/http/http_client.h"

namespace tensorizer::io {

struct HttpUploader : HttpSender {
  explicit HttpUploader(const HttpOptions& http_options)
      : HttpSender(http_options, http_options.max_connections) {}
};

struct HttpPut {
  struct Target {
    std::string url;
    HttpHeaderList headers = {};  // sent to the origin of the URL only
  };
  // Asked before each try: a presigned URL may have expired meanwhile. What it throws after a
  // server has answered counts as a failed try.
  std::function<Target()> target;
  // Asked about a failure that another try as it is would meet again: true where target() gives
  // another one now. May be empty.
  std::function<bool(const HttpFailure&)> adapt;
  // For messages, without credentials: "s3://bucket/key". Empty: the URL without its query.
  std::string display_name;
  ConstBuffer body;
};

// Returns the 2xx response (its ETag, for a part of a multipart upload). Throws Error:
// io, not_found, cancelled, and what target() throws. Nothing reads the body any more when it
// returns or throws.
HttpResponse http_put(HttpUploader& uploader, const HttpPut& put, const std::stop_token& stop);

}  // namespace tensorizer::io
