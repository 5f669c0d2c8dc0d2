// libcurl's handles with owners, and what its errors mean. libcurl is initialised at the first use
// in a process and never torn down.
#pragma once

#include <curl/curl.h>

#include <memory>
#include <string>

namespace tensorizer::io {

struct FreeCurlEasy {
  void operator()(CURL* easy) const noexcept { curl_easy_cleanup(easy); }
};
struct FreeCurlMulti {
  void operator()(CURLM* multi) const noexcept { curl_multi_cleanup(multi); }
};
struct FreeCurlList {
  void operator()(curl_slist* list) const noexcept { curl_slist_free_all(list); }
};
using UniqueCurlEasy = std::unique_ptr<CURL, FreeCurlEasy>;
using UniqueCurlMulti = std::unique_ptr<CURLM, FreeCurlMulti>;
using UniqueCurlList = std::unique_ptr<curl_slist, FreeCurlList>;

// Initialise libcurl where that was not done yet. Throw Errc::io, std::bad_alloc.
UniqueCurlEasy new_curl_easy();
UniqueCurlMulti new_curl_multi();  // null without free descriptors

// What libcurl says of an error: of that transfer, whose CURLOPT_ERRORBUFFER is given, or of the
// code.
std::string curl_error_text(const char* buffer, CURLcode code);
// The errno behind an error of a transfer, or 0. Ask before the handle is used again.
int curl_system_errno(CURL* easy, CURLcode code);

// Appends `line` to a list of header lines.
void append_line(UniqueCurlList& list, const std::string& line);

// While it lives, a write to a closed connection gives an error and no SIGPIPE, whatever the
// program did with that signal: libcurl's TLS library writes without MSG_NOSIGNAL.
class SigpipeGuard {
 public:
  SigpipeGuard() noexcept;
  ~SigpipeGuard();
  SigpipeGuard(const SigpipeGuard&) = delete;
  SigpipeGuard& operator=(const SigpipeGuard&) = delete;

 private:
  bool blocked_ = false;
};

// What a libcurl error means: the one table. `text` is libcurl's own description of the error.
struct CurlVerdict {
  std::string name;        // "curl error 7"
  bool transient = false;  // another try may do better
  const char* hint = "";
};
CurlVerdict curl_verdict(CURLcode code, const std::string& text);

}  // namespace tensorizer::io
