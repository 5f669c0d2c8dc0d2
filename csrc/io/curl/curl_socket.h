// A stream connection: TCP, in clear or inside TLS. Confined to one thread at a
// time.
//
// libcurl connects: it looks names up without blocking, divides the time among the addresses, and
// trusts the certificates that HTTPS trusts. Every wait looks at the stop token a few times per
// second and ends with a SocketError when the peer stays silent for the stall timeout. A socket
// that threw is broken: destroy it. In a child that was forked it is left to the parent.
#pragma once

#include <chrono>
#include <cstdint>
#include <stop_token>
#include <string>

#include "core/error.h"
#include "core/fork.h"
#include "io/buffers.h"
#include "io/curl/curl_handle.h"
#include "io/curl/curl_trust.h"

namespace tensorizer::io {

struct SocketOptions {
  std::string host;
  uint16_t port = 0;
  bool tls = false;
  CurlTrust trust = {};
  // For name look-up, all addresses and TLS; an address that does not answer leaves time for
  // others.
  std::chrono::milliseconds connect_timeout{10'000};
  int receive_buffer_nbytes = 0;                    // SO_RCVBUF; 0 leaves it to the system
  std::chrono::milliseconds stall_timeout{30'000};  // no byte either way
};

class SocketError : public Error {
 public:
  SocketError(const std::string& what, std::string peer, bool may_pass)
      : Error(Errc::io, what, std::move(peer)), passing(may_pass) {}
  bool passing;  // another connection may do better
};

class CurlSocket {
 public:
  // Connects, and shakes hands where TLS is on. `peer` names the other side in messages.
  // Throws SocketError (with the errno where there is one), Errc::cancelled.
  CurlSocket(const SocketOptions& options, std::string peer, const std::stop_token& stop);

  // At least 1 byte and at most into.size(). Throws SocketError when the peer closed the
  // connection.
  size_t receive_some(Buffer into, const std::stop_token& stop);

  // All of `from`, or throws.
  void send_all(ConstBuffer from, const std::stop_token& stop);

  // False once the server has closed it or said something unasked. What TLS has decrypted already
  // is not seen.
  bool is_quiet() const noexcept;
  bool is_of_this_process() const noexcept { return connection_.owner.is_this_one(); }

 private:
  using Deadline = std::chrono::steady_clock::time_point;

  // A child that was forked leaves both handles to the parent, for which they speak.
  struct Connection {
    ~Connection();
    UniqueCurlMulti multi = new_curl_multi();
    UniqueCurlEasy easy = new_curl_easy();
    OwnerProcess owner;
  };

  void configure(const SocketOptions& options);
  CURLcode connect(const std::stop_token& stop);
  CURL* easy() const noexcept { return connection_.easy.get(); }
  [[noreturn]] void fail(const char* operation, CURLcode code) const;
  [[noreturn]] void fail_silent(const char* operation) const;
  void wait_ready(short events, Deadline deadline, const char* operation,
                  const std::stop_token& stop) const;
  Deadline stall_deadline() const { return std::chrono::steady_clock::now() + stall_timeout_; }

  const std::string peer_;
  const std::string url_;
  const std::chrono::milliseconds stall_timeout_;
  int receive_buffer_nbytes_;
  const bool tls_;
  char error_text_[CURL_ERROR_SIZE] = "";
  Connection connection_;
  curl_socket_t socket_ = CURL_SOCKET_BAD;
};

}  // namespace tensorizer::io
