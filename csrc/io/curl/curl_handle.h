// libcurl's handles with owners, and drivers: each has some connections, and one thread at a time
// moves them.
//
// libcurl is initialised at the first use in a process and never torn down. A driver belongs to the
// process that made it: after fork the child leaves the parent's connections alone and makes its
// own.
#pragma once

#include <curl/curl.h>
#include <sys/types.h>

#include <chrono>
#include <functional>
#include <memory>
#include <stop_token>
#include <string>
#include <vector>

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

// Confined to one thread at a time.
class CurlDriver {
 public:
  CurlDriver();
  ~CurlDriver();
  CurlDriver(const CurlDriver&) = delete;
  CurlDriver& operator=(const CurlDriver&) = delete;

  // A handle in its first state, for one request; give it back with give_easy.
  UniqueCurlEasy take_easy();
  void give_easy(UniqueCurlEasy easy) noexcept;

  // `easy` starts to move with perform().
  void add(CURL* easy);
  void remove(CURL* easy) noexcept;

  // Moves whatever can be moved without waiting. Requests find their end in the CURLcode that their
  // CURLOPT_PRIVATE pointer, a CurlCompletion, receives. REQUIRES: the caller holds a SigpipeGuard.
  void perform();
  // Waits until there is something to move, `timeout` is over, or wake() was called.
  void wait(std::chrono::milliseconds timeout);
  // The one call that is allowed from another thread.
  void wake() noexcept { curl_multi_wakeup(multi_.get()); }

  bool belongs_to_this_process() const noexcept;

 private:
  UniqueCurlMulti multi_;
  std::vector<UniqueCurlEasy> spare_;
  const pid_t process_;
};

// Where CurlDriver::perform notes the end of a request.
struct CurlCompletion {
  bool done = false;
  CURLcode code = CURLE_OK;
};

// What a libcurl error means: the one table. `text` is libcurl's own description of the error.
struct CurlVerdict {
  std::string name;        // "curl error 7"
  bool transient = false;  // another try may do better
  const char* hint = "";
};
CurlVerdict curl_verdict(CURLcode code, const std::string& text);

// Runs `driver` until `done()` says so; throws Errc::cancelled on a stop. done() may throw.
void drive(CurlDriver& driver, const std::stop_token& stop, const std::function<bool()>& done);

}  // namespace tensorizer::io
