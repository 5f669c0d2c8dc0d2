// One GET or PUT: sends it, judges the response as soon as its headers are in, hands the body to a
// sink.
//
// The thread that makes it waits; a thread of the reactor moves it, and calls `accept` and the
// sink. Neither is called after the destructor. Confined to one thread.
#pragma once

#include <atomic>
#include <chrono>
#include <exception>
#include <functional>
#include <optional>
#include <span>
#include <stop_token>
#include <string>
#include <string_view>
#include <vector>

#include "core/sync.h"
#include "io/buffers.h"
#include "io/curl/curl_handle.h"
#include "io/http/http_message.h"
#include "io/http/http_options.h"
#include "io/http/http_reactor.h"
#include "io/http/http_url.h"

namespace tensorizer::io {

// Takes the bytes of an accepted body; as it is, it drops them.
class BodySink {
 public:
  virtual ~BodySink() = default;
  // False while no byte can be taken: the transfer is paused until resume().
  virtual bool ready() const noexcept { return true; }
  // True when the thread that waits for the body has all the bytes that it wants.
  virtual bool has_enough() const noexcept { return false; }
  // Takes all of `bytes`, or throws HttpFailure.
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
  std::optional<ConstBuffer> body = std::nullopt;
  // A body that stalls is given up after kBodyStall: see HttpFailure::stalled_body.
  bool gives_up_stalled_body = false;
};

// Counters of a source, for its Python side and for tests.
struct HttpCounters {
  std::atomic<uint64_t> bytes{0};
  std::atomic<uint64_t> requests{0};
  std::atomic<uint64_t> connections{0};
  std::atomic<bool> answered{false};  // a server has sent the headers of a response
};

class HttpExchange final : private HttpTransfer {
 public:
  // Called with the headers of a response that is neither an error nor a redirect, and of what
  // answers a GET as well as an error (304, 416); returns the sink of the body. Throws HttpFailure
  // to refuse it.
  using Accept = std::function<BodySink*(const HttpResponse&)>;

  HttpExchange(const HttpOptions& options, const HttpRequest& request, Accept accept,
               HttpCounters& counters);
  ~HttpExchange() override;

  // Returns true when the response was accepted, false when the response is a redirect. Throws
  // HttpFailure, Errc::cancelled.
  bool wait_for_response(const std::stop_token& stop);
  // Returns true when the body is in, false when `enough`, if not empty, says so. Calls
  // `on_idle`, if not empty, now and then; it may throw. Throws HttpFailure, Errc::cancelled.
  bool wait_for_body(const std::stop_token& stop, const std::function<bool()>& enough,
                     const std::function<void()>& on_idle);

  // REQUIRES: wait_for_response() has returned.
  const HttpResponse& response() const noexcept { return response_; }
  // Goes on after the sink was not ready.
  void resume();

  // REQUIRES: wait_for_response() has returned.
  std::chrono::duration<double> time_to_connect() const noexcept { return time_to_connect_; }
  std::chrono::duration<double> time_to_first_byte() const noexcept { return time_to_first_byte_; }

 private:
  template <auto kTake>
  static size_t on_data(char* data, size_t size, size_t count, void* self) noexcept;
  static size_t on_send(char* data, size_t size, size_t count, void* self) noexcept;
  static int on_seek(void* self, curl_off_t offset, int origin) noexcept;
  size_t take_header_line(std::string_view line);
  void headers_are_complete();
  size_t take_body(std::string_view text);
  void configure(const HttpRequest& request);
  void configure_headers(const HttpRequest& request);
  void configure_upload(ConstBuffer body);
  void note_connection() noexcept;
  void tell() noexcept;
  void ended(CURLcode code) noexcept override;
  // How it ended. Throws HttpFailure.
  void finish(CURLcode code) const;
  [[noreturn]] void fail(CURLcode code) const;

  const HttpOptions& options_;
  HttpReactor& reactor_;
  HttpCounters& counters_;
  const bool gives_up_stalled_body_;
  UniqueCurlList header_lines_;
  const std::vector<std::string> secrets_;  // removed from messages
  bool sends_password_ = false;             // in a code of its own
  char error_text_[CURL_ERROR_SIZE] = "";
  std::optional<ConstBuffer> upload_;

  // Of the thread of the reactor until `accepted_` or `end_`.
  Accept accept_;
  HttpResponse response_;
  std::chrono::duration<double> time_to_connect_{0};
  std::chrono::duration<double> time_to_first_byte_{0};
  // Of the thread of the reactor until `end_`.
  size_t headers_nbytes_ = 0;
  bool headers_complete_ = false;
  BodySink* sink_ = nullptr;
  std::string error_body_;
  uint64_t error_body_nbytes_ = 0;
  std::exception_ptr failure_;
  uint64_t received_ = 0;
  uint64_t told_ = 0;  // of those
  size_t upload_at_ = 0;
  bool counted_ = false;

  mutable Mutex mutex_;
  CondVar changed_;
  bool accepted_ GUARDED_BY(mutex_) = false;
  bool listens_ GUARDED_BY(mutex_) = false;  // whether the thread that waits wants news
  bool news_ GUARDED_BY(mutex_) = false;     // since it has last looked
  std::optional<CURLcode> end_ GUARDED_BY(mutex_);
};

// What a libcurl error means. `text` is its own description, already without secrets;
// `system_errno` is 0 where there is none.
HttpFailure failure_of_curl(CURLcode code, const std::string& text, int system_errno = 0);

}  // namespace tensorizer::io
