// One ranged GET in clear over HTTP/1.1 whose body goes from the socket straight into its
// destination: libcurl's own way costs one more copy.
//
// Does what nearly every response needs and nothing else. Whatever it does not know (another
// framing, a redirect, a 200) makes the request `unfit`: libcurl is to send it again. Confined to
// one thread; the caller drives the lane and looks at check() after every step.
#pragma once

#include <array>
#include <memory>
#include <string>

#include "io/curl/curl_connection.h"
#include "io/http/http_exchange.h"
#include "io/scatter_cursor.h"

namespace tensorizer::io {

class DirectRead {
 public:
  using Clock = std::chrono::steady_clock;
  enum class Outcome { running, complete, unfit };
  // Called with the head of a 206. Throws HttpFailure to refuse it.
  using Accept = std::function<void(const ResponseHead&)>;

  // Begins a request; null where it cannot be sent this way: http://, no proxy, no password,
  // HTTP/1.1 allowed. Proxies of the environment are not looked for: HttpOptions::direct_nbytes
  // rules it out there. REQUIRES: `into` has room for the range; the lane, `into` and the counters
  // outlive it.
  static std::unique_ptr<DirectRead> begin(CurlLane& lane, const HttpOptions& options,
                                           const HttpRequest& request, Accept accept,
                                           ScatterCursor& into, HttpCounters& counters);

  // Whether a response is framed in a way that is understood here.
  static bool knows(const ResponseHead& head);

  // Ends a connection in the middle of a response.
  ~DirectRead();
  DirectRead(const DirectRead&) = delete;
  DirectRead& operator=(const DirectRead&) = delete;

  // Moves what can be moved without waiting. Throws HttpFailure when the request failed or stalls.
  Outcome check();
  // Body bytes in place.
  uint64_t received() const noexcept { return received_; }
  // From the request to its response; zero while there is none.
  std::chrono::duration<double> time_to_first_byte() const noexcept { return to_first_byte_; }

 private:
  enum class Step { connect, send, head, error_body, body, over };

  DirectRead(CurlLane& lane, const HttpOptions& options, ConnectOptions connect_options,
             std::string request_text, Accept accept, ScatterCursor& into, HttpCounters& counters);
  void connect();
  bool take_connection();
  Outcome send_request();
  Outcome receive_head();
  Outcome head_is_complete(size_t head_nbytes);
  Outcome receive_error_body();
  Outcome receive_body();
  Outcome end();
  Outcome unfit();
  bool try_another_connection();
  [[noreturn]] void fail_broken(const std::string& reason) const;
  // What recv() or recvmsg() returned: bytes, 0 at the end of the connection, nullopt for nothing
  // at the moment.
  std::optional<size_t> judge_received(ssize_t result);
  void note_received(size_t nbytes) noexcept;
  Outcome wait_for(short events);

  CurlLane& lane_;
  Accept accept_;
  ScatterCursor& into_;
  HttpCounters& counters_;
  const ConnectOptions connect_options_;
  const std::string request_text_;
  std::unique_ptr<CurlConnection> connection_;
  bool reused_ = false;
  Step step_ = Step::connect;
  size_t sent_ = 0;
  std::string head_text_;  // and what came with it
  ResponseHead head_;
  uint64_t body_nbytes_ = 0;
  uint64_t received_ = 0;
  uint64_t heard_ = 0;  // with heads and bodies of errors
  Clock::time_point sent_at_;
  std::chrono::duration<double> to_first_byte_{0};
  StallWatch watch_;
};

}  // namespace tensorizer::io
