// libcurl's handles with owners, what its errors mean, and drivers: each has one connection, and
// one thread at a time moves it.
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
#include <optional>
#include <stop_token>
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
UniqueCurlMulti new_curl_multi();

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

// Confined to one thread at a time.
class CurlDriver {
 public:
  CurlDriver();
  ~CurlDriver();
  CurlDriver(const CurlDriver&) = delete;
  CurlDriver& operator=(const CurlDriver&) = delete;

  // Moves whatever can be moved without waiting. REQUIRES: the caller holds a SigpipeGuard.
  void perform();
  // Waits until there is something to move, `timeout` is over, or wake() was called.
  void wait(std::chrono::milliseconds timeout);
  // The only call that is allowed from another thread.
  void wake() noexcept { curl_multi_wakeup(multi_.get()); }

  bool belongs_to_this_process() const noexcept;

 private:
  friend class CurlTransfer;

  UniqueCurlMulti multi_;
  const pid_t process_;
};

// One transfer of a driver, from start() to the destructor, which ends it where it is; in a child
// that was forked it is left to the parent.
class CurlTransfer {
 public:
  explicit CurlTransfer(CurlDriver& driver);
  ~CurlTransfer();
  CurlTransfer(const CurlTransfer&) = delete;
  CurlTransfer& operator=(const CurlTransfer&) = delete;

  CURL* easy() const noexcept { return easy_.get(); }
  // It moves with CurlDriver::perform() from now on.
  void start();
  // How it ended; nullopt while it has not.
  std::optional<CURLcode> end() const noexcept { return end_; }
  std::string error_text(CURLcode code) const { return curl_error_text(error_text_, code); }
  int system_errno(CURLcode code) const { return curl_system_errno(easy(), code); }

 private:
  friend class CurlDriver;

  CurlDriver& driver_;
  UniqueCurlEasy easy_;
  std::optional<CURLcode> end_;
  char error_text_[CURL_ERROR_SIZE] = "";
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
