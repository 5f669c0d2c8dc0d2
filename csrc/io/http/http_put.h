// Uploads: one PUT of bytes in memory, repeated whole where it fails for a passing reason.
#pragma once

#include <functional>
#include <span>
#include <stop_token>
#include <string>
#include <vector>

#include "io/http/http_client.h"
#include "io/slices.h"

namespace tensorizer::io {

// What uploads share: settings, connections that are kept, counters. Safe from many threads.
struct HttpUploader {
  explicit HttpUploader(HttpOptions http_options)
      : options(std::move(http_options)),
        connections(options.max_connections, options.connection_key()) {}

  const HttpOptions options;
  HttpCounters counters;  // bytes counts what was sent, repetitions included
  HttpConnections connections;
};

struct HttpPut {
  // Gives the URL of each try: a presigned one may have expired meanwhile. What it throws after an
  // upload has worked counts as a failed try.
  std::function<std::string()> url;
  // For messages, without credentials: "s3://bucket/key". Empty: the URL without its query.
  std::string display_name;
  // "Name: value", sent to the origin of the URL only.
  std::vector<std::string> header_lines;
  std::span<const ConstSlice> body;
};

// Returns the head of the 2xx response (its ETag, for a part of a multipart upload). Throws Error:
// io, not_found, cancelled, and what url() throws. Nothing reads the body any more when it returns
// or throws.
ResponseHead http_put(HttpUploader& uploader, const HttpPut& put, const std::stop_token& stop);

}  // namespace tensorizer::io
