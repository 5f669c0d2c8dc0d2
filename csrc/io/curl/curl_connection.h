// A stream connection that libcurl makes and others use: it looks names up without blocking,
// divides the time among the addresses, and trusts whom HTTPS trusts. Moves with its lane.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <string>

#include "io/curl/curl_handle.h"
#include "io/curl/curl_trust.h"

namespace tensorizer::io {

struct ConnectOptions {
  std::string host;
  uint16_t port = 0;
  std::string unix_path = {};  // used in place of host and port unless empty
  bool tls = false;
  CurlTrust trust = {};
  // For name look-up, all addresses and TLS; an address that does not answer leaves time for
  // others.
  std::chrono::milliseconds connect_timeout{10'000};
  int receive_buffer_nbytes = 0;  // SO_RCVBUF; 0 leaves it to the kernel
};

class CurlConnection {
 public:
  // Starts to connect; `lane` outlives this and has to be moved on (CurlLane::perform).
  CurlConnection(CurlLane& lane, const ConnectOptions& options);
  // Ends the connection; in a child that was forked it is left to the parent.
  ~CurlConnection();
  CurlConnection(const CurlConnection&) = delete;
  CurlConnection& operator=(const CurlConnection&) = delete;

  // True once libcurl has connected or has failed to, as code() says.
  bool done() const noexcept { return completion_.done; }
  CURLcode code() const noexcept;
  // What libcurl says of the failure `code`.
  std::string error_text(CURLcode code) const;
  CURL* easy() const noexcept { return easy_.get(); }
  // CURL_SOCKET_BAD until it is connected.
  curl_socket_t socket() const noexcept;
  // Connected, and neither closed by the peer nor with bytes that nobody asked for. Not for TLS.
  bool is_quiet() const noexcept;
  // Whether `options` name the same server.
  bool leads_to(const ConnectOptions& options) const;

 private:
  CurlLane& lane_;
  const std::string url_;
  int receive_buffer_nbytes_;
  UniqueCurlEasy easy_;
  CurlCompletion completion_;
  std::string error_text_;
};

}  // namespace tensorizer::io
