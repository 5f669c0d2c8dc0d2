// A stream connection: TCP or a Unix socket, in clear or inside TLS. Confined to one thread at a
// time.
//
// CurlConnection connects. Every wait looks at the stop token a few times per second and ends with
// a SocketError when the peer stays silent for the stall timeout. A socket that threw is broken:
// destroy it. In a child that was forked it is left to the parent.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <stop_token>
#include <string>

#include "core/error.h"
#include "io/curl/curl_connection.h"
#include "io/curl/curl_handle.h"
#include "io/slices.h"

namespace tensorizer::io {

struct SocketOptions : ConnectOptions {
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
  CurlSocket(const CurlSocket&) = delete;
  CurlSocket& operator=(const CurlSocket&) = delete;

  // At least 1 byte and at most into.size(). Throws SocketError when the peer closed the
  // connection.
  size_t receive_some(Slice into, const std::stop_token& stop);

  // All of `from`, or throws.
  void send_all(ConstSlice from, const std::stop_token& stop);

  bool belongs_to_this_process() const noexcept { return lane_.belongs_to_this_process(); }

 private:
  using Deadline = std::chrono::steady_clock::time_point;

  [[noreturn]] void fail(const char* operation, CURLcode code) const;
  [[noreturn]] void fail_silent(const char* operation) const;
  void wait_ready(short events, Deadline deadline, const char* operation,
                  const std::stop_token& stop) const;
  Deadline stall_deadline() const { return std::chrono::steady_clock::now() + stall_timeout_; }

  const std::string peer_;
  const std::chrono::milliseconds stall_timeout_;
  const bool tls_;
  CurlLane lane_;
  CurlConnection connection_;
  curl_socket_t socket_ = CURL_SOCKET_BAD;
};

}  // namespace tensorizer::io
