// What a libcurl error means: the one table. Pure.
#pragma once

#include <curl/curl.h>

#include <string>

namespace tensorizer::io {

struct CurlVerdict {
  std::string name;        // "curl error 7"
  bool transient = false;  // another try may do better
  const char* hint = "";
};

// `text` is libcurl's own description of the error.
CurlVerdict curl_verdict(CURLcode code, const std::string& text);

}  // namespace tensorizer::io
