// A stream connection: TCP or a Unix socket, in clear or inside TLS. Confined to one thread at a
// time.
//
// Every wait looks at the stop token a few times per second and ends with Errc::io when the peer
// stays silent for the stall timeout. A socket that threw is broken: close it.
#pragma once

#include <openssl/ssl.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <stop_token>
#include <string>

#include "core/unique_fd.h"
#include "io/slices.h"

namespace tensorizer::io {

struct TlsOptions {
  bool enabled = false;
  // Trust anchors; both empty means the system's (with SSL_CERT_FILE and SSL_CERT_DIR, as OpenSSL
  // reads them).
  std::string ca_file;
  std::string ca_path;
  // The client's own certificate and key, PEM; empty for none.
  std::string certificate_file;
  std::string key_file;
  bool verify_certificate = true;
  bool verify_host = true;
};

struct SocketOptions {
  std::string host;
  uint16_t port = 0;
  std::string unix_path;  // used in place of host and port unless empty
  TlsOptions tls;
  std::chrono::milliseconds connect_timeout{10'000};
  std::chrono::milliseconds stall_timeout{30'000};  // no byte either way
  int receive_buffer_nbytes = 0;                    // SO_RCVBUF; 0 leaves it to the kernel
};

struct SslContextDeleter {
  void operator()(SSL_CTX* context) const noexcept { SSL_CTX_free(context); }
};
using SslContext = std::unique_ptr<SSL_CTX, SslContextDeleter>;

struct SslDeleter {
  void operator()(SSL* ssl) const noexcept { SSL_free(ssl); }
};
using Ssl = std::unique_ptr<SSL, SslDeleter>;

class NetSocket {
 public:
  // Connects, and shakes hands where TLS is on. `peer` names the other side in messages.
  // Throws Errc::io (with the errno where there is one), invalid_argument for unusable certificate
  // files.
  NetSocket(const SocketOptions& options, std::string peer, const std::stop_token& stop);

  // At least 1 byte and at most into.size(). Throws Errc::io when the peer closed the connection.
  size_t receive_some(Slice into, const std::stop_token& stop);

  // All of `from`, or throws.
  void send_all(ConstSlice from, const std::stop_token& stop);

 private:
  using Deadline = std::chrono::steady_clock::time_point;

  UniqueFd connect_tcp(const SocketOptions& options, Deadline deadline,
                       const std::stop_token& stop);
  UniqueFd connect_unix(const SocketOptions& options, Deadline deadline,
                        const std::stop_token& stop);
  void finish_connect(int fd, Deadline deadline, const std::stop_token& stop);
  void start_tls(const SocketOptions& options, Deadline deadline, const std::stop_token& stop);
  void wait_tls(int result, const char* operation, Deadline deadline, const std::stop_token& stop);
  void wait_ready(int fd, short events, Deadline deadline, const char* operation,
                  const std::stop_token& stop);
  Deadline stall_deadline() const { return std::chrono::steady_clock::now() + stall_timeout_; }

  std::string peer_;
  std::chrono::milliseconds stall_timeout_;
  UniqueFd fd_;
  SslContext context_;
  Ssl ssl_;
};

}  // namespace tensorizer::io
