// One GET or PUT on one driver: sends it, judges the head as soon as it is in, hands the body to a
// sink, notices stalls.
//
// Confined to one thread. Nothing is written to the sink after the destructor. The caller drives
// the driver (CurlDriver::perform, wait) and looks at check() after every step.
#pragma once

#include <atomic>
#include <chrono>
#include <exception>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "io/curl/curl_handle.h"
#include "io/http/http_message.h"
#include "io/http/http_options.h"
#include "io/http/http_url.h"
#include "io/slices.h"

namespace tensorizer::io {

// Where the bytes of an accepted body go; nowhere, where nobody wants them.
class BodySink {
 public:
  virtual ~BodySink() = default;
  // False while no byte can be taken: the transfer rests until resume().
  virtual bool ready() const noexcept { return true; }
  // Takes all of `bytes` or throws HttpFailure.
  virtual void put(std::span<const std::byte> /*bytes*/) {}
};

struct HttpRequest {
  const HttpUrl* url = nullptr;
  bool send_credentials = true;  // false where a redirect has led to another host
  std::string range = {};        // "0-99"; empty for none
  std::vector<std::string> header_lines = {};
  // Sent like HttpOptions::headers, over those of the same name; borrowed for the constructor.
  const HttpHeaderList* further_headers = nullptr;
  // With it the request is a PUT; borrowed for the exchange.
  std::optional<ConstSlice> body = std::nullopt;
};

// Counters of a source, for its Python side and for tests.
struct HttpCounters {
  std::atomic<uint64_t> bytes{0};
  std::atomic<uint64_t> requests{0};
  std::atomic<uint64_t> connections{0};
  std::atomic<bool> answered{false};  // a server has sent the head of a response
};

// Notices a transfer that brings too little for too long.
class StallWatch {
 public:
  using Clock = std::chrono::steady_clock;
  explicit StallWatch(const HttpOptions& options) noexcept : options_(options) {}
  // From now on, with `nbytes` there.
  void restart(uint64_t nbytes) noexcept {
    since_ = Clock::now();
    nbytes_ = nbytes;
  }
  // `nbytes` have moved; `heard`: some of them from the server, whose status is that of the
  // response or 0. Throws HttpFailure.
  void check(uint64_t nbytes, bool heard, int status);

 private:
  const HttpOptions& options_;
  // Start of the time in which bytes must come, and how many there were then.
  Clock::time_point since_ = Clock::now();
  uint64_t nbytes_ = 0;
};

class HttpExchange {
 public:
  using Clock = std::chrono::steady_clock;
  // Called with the head of a response that is neither an error nor a redirect, and of what answers
  // a GET as well as an error (304, 416); returns the sink of the body. Throws HttpFailure to
  // refuse it.
  using Accept = std::function<BodySink*(const ResponseHead&)>;

  HttpExchange(CurlDriver& driver, const HttpOptions& options, const HttpRequest& request,
               Accept accept, HttpCounters& counters);

  // True when the response is in completely, or is a redirect. Throws HttpFailure when it failed or
  // stalls.
  bool check();

  // Whether the head was accepted.
  bool accepted() const noexcept { return sink_ != nullptr; }
  const ResponseHead& head() const noexcept { return head_; }
  // Body bytes that went to the sink.
  uint64_t received() const noexcept { return received_; }
  // Goes on after the sink was not ready.
  void resume();

  std::chrono::duration<double> time_to_connect() const noexcept;
  std::chrono::duration<double> time_to_first_byte() const noexcept;

 private:
  template <auto kTake>
  static size_t on_data(char* data, size_t size, size_t count, void* self) noexcept;
  static size_t on_send(char* data, size_t size, size_t count, void* self) noexcept;
  static int on_seek(void* self, curl_off_t offset, int origin) noexcept;
  size_t take_header_line(std::string_view line);
  void head_is_complete();
  size_t take_body(std::string_view text);
  void configure(const HttpRequest& request);
  void configure_headers(const HttpRequest& request);
  void configure_upload(ConstSlice body);
  void check_progress();
  [[noreturn]] void fail(CURLcode code) const;

  const HttpOptions& options_;
  Accept accept_;
  HttpCounters& counters_;
  UniqueCurlList header_lines_;
  const std::vector<std::string> secrets_;  // removed from messages
  bool sends_password_ = false;             // in a code of its own
  ResponseHead head_;
  size_t head_nbytes_ = 0;
  bool head_complete_ = false;
  BodySink* sink_ = nullptr;
  std::string error_body_;
  uint64_t error_body_nbytes_ = 0;
  std::exception_ptr failure_;
  uint64_t received_ = 0;
  std::optional<ConstSlice> upload_;
  size_t upload_at_ = 0;
  uint64_t sent_ = 0;
  bool resting_ = false;
  bool counted_ = false;
  StallWatch watch_;
  CurlTransfer transfer_;  // ends before what it uses
};

// The headers of the caller that go with a request; `further_headers` replace options of the name.
HttpHeaderList fields_of(const HttpOptions& options, const HttpRequest& request);

// What a request holds that no message may tell.
std::vector<std::string> secrets_of(const HttpOptions& options, const HttpRequest& request);

// What a libcurl error means. `text` is its own description, already without secrets;
// `system_errno` is 0 where there is none.
HttpFailure failure_of_curl(CURLcode code, const std::string& text, int system_errno = 0);

// Settings that all requests share: connecting, TLS, proxies, HTTP version.
void apply_connection_options(CURL* easy, const HttpOptions& options, const HttpUrl& url);

}  // namespace tensorizer::io
