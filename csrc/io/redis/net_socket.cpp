#include "io/redis/net_socket.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <openssl/err.h>
#include <openssl/x509v3.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "core/error.h"
#include "core/stop.h"

namespace tensorizer::io {
namespace {

constexpr std::chrono::milliseconds kStopPollInterval{100};

[[noreturn]] void fail(const std::string& operation, const std::string& peer,
                       const std::string& problem) {
  throw Error(Errc::io, operation + " " + peer + ": " + problem, peer);
}

// The reason as OpenSSL's error queue tells it; empties the queue.
std::string tls_reason() {
  std::string reason;
  while (unsigned long code = ERR_get_error()) {
    const char* text = ERR_reason_error_string(code);
    if (!reason.empty()) reason += "; ";
    reason += text ? text : "error " + std::to_string(code);
  }
  return reason.empty() ? "unknown TLS error" : reason;
}

struct AddressListDeleter {
  void operator()(addrinfo* list) const noexcept { ::freeaddrinfo(list); }
};
using AddressList = std::unique_ptr<addrinfo, AddressListDeleter>;

AddressList resolve(const SocketOptions& options, const std::string& peer) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* list = nullptr;
  const std::string port = std::to_string(options.port);
  if (int rc = ::getaddrinfo(options.host.c_str(), port.c_str(), &hints, &list); rc != 0)
    fail("resolve the host of", peer, ::gai_strerror(rc));
  return AddressList(list);
}

UniqueFd open_socket(int family, const SocketOptions& options, const std::string& peer) {
  UniqueFd fd(::socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd) throw_errno("open a socket to", peer, errno);
  if (options.receive_buffer_nbytes > 0)
    ::setsockopt(fd.get(), SOL_SOCKET, SO_RCVBUF, &options.receive_buffer_nbytes, sizeof(int));
  return fd;
}

bool would_block(int err) { return err == EAGAIN || err == EWOULDBLOCK; }

// OpenSSL's own socket BIO writes with write(2), which raises SIGPIPE on a connection that the peer
// has closed; a library has no business with the process's signals. The BIO below is the same with
// MSG_NOSIGNAL.
int bio_fd(BIO* bio) { return static_cast<int>(reinterpret_cast<intptr_t>(BIO_get_data(bio))); }

int bio_write(BIO* bio, const char* data, int nbytes) {
  const ssize_t n = ::send(bio_fd(bio), data, static_cast<size_t>(nbytes), MSG_NOSIGNAL);
  BIO_clear_retry_flags(bio);
  if (n < 0 && (would_block(errno) || errno == EINTR)) BIO_set_retry_write(bio);
  return static_cast<int>(n);
}

int bio_read(BIO* bio, char* data, int nbytes) {
  const ssize_t n = ::recv(bio_fd(bio), data, static_cast<size_t>(nbytes), 0);
  BIO_clear_retry_flags(bio);
  if (n < 0 && (would_block(errno) || errno == EINTR)) BIO_set_retry_read(bio);
  return static_cast<int>(n);
}

long bio_control(BIO*, int command, long, void*) { return command == BIO_CTRL_FLUSH ? 1 : 0; }

BIO* make_bio(int fd) {
  static BIO_METHOD* const method = [] {
    BIO_METHOD* made = BIO_meth_new(BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "socket");
    BIO_meth_set_write(made, &bio_write);
    BIO_meth_set_read(made, &bio_read);
    BIO_meth_set_ctrl(made, &bio_control);
    return made;
  }();
  BIO* bio = BIO_new(method);
  if (!bio) throw std::bad_alloc();
  BIO_set_data(bio, reinterpret_cast<void*>(static_cast<intptr_t>(fd)));
  BIO_set_init(bio, 1);
  return bio;
}

void load_trust(SSL_CTX* context, const TlsOptions& tls) {
  if (tls.ca_file.empty() && tls.ca_path.empty()) {
    SSL_CTX_set_default_verify_paths(context);
    return;
  }
  const char* file = tls.ca_file.empty() ? nullptr : tls.ca_file.c_str();
  const char* path = tls.ca_path.empty() ? nullptr : tls.ca_path.c_str();
  if (SSL_CTX_load_verify_locations(context, file, path) != 1)
    throw Error(Errc::invalid_argument, "cannot load trusted certificates from " +
                                            (file ? tls.ca_file : tls.ca_path) + ": " +
                                            tls_reason());
  // A self-signed server certificate may be its own trust anchor.
  X509_VERIFY_PARAM_set_flags(SSL_CTX_get0_param(context), X509_V_FLAG_PARTIAL_CHAIN);
}

void load_identity(SSL_CTX* context, const TlsOptions& tls) {
  if (tls.certificate_file.empty()) return;
  const std::string& key = tls.key_file.empty() ? tls.certificate_file : tls.key_file;
  if (SSL_CTX_use_certificate_chain_file(context, tls.certificate_file.c_str()) != 1 ||
      SSL_CTX_use_PrivateKey_file(context, key.c_str(), SSL_FILETYPE_PEM) != 1)
    throw Error(Errc::invalid_argument,
                "cannot load the client certificate " + tls.certificate_file + ": " + tls_reason());
}

SslContext make_context(const TlsOptions& tls) {
  ERR_clear_error();
  SslContext context(SSL_CTX_new(TLS_client_method()));
  if (!context) throw std::bad_alloc();
  SSL_CTX_set_min_proto_version(context.get(), TLS1_2_VERSION);
  SSL_CTX_set_mode(context.get(),
                   SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
  SSL_CTX_set_verify(context.get(), tls.verify_certificate ? SSL_VERIFY_PEER : SSL_VERIFY_NONE,
                     nullptr);
  if (tls.verify_certificate) load_trust(context.get(), tls);
  load_identity(context.get(), tls);
  return context;
}

bool is_ip_address(const std::string& host) {
  unsigned char bytes[sizeof(in6_addr)];
  return ::inet_pton(AF_INET, host.c_str(), bytes) == 1 ||
         ::inet_pton(AF_INET6, host.c_str(), bytes) == 1;
}

void name_peer(SSL* ssl, const SocketOptions& options) {
  const bool ip = is_ip_address(options.host);
  if (!ip) SSL_set_tlsext_host_name(ssl, options.host.c_str());
  if (!options.tls.verify_certificate || !options.tls.verify_host) return;
  X509_VERIFY_PARAM* wanted = SSL_get0_param(ssl);
  const int ok = ip ? X509_VERIFY_PARAM_set1_ip_asc(wanted, options.host.c_str())
                    : X509_VERIFY_PARAM_set1_host(wanted, options.host.c_str(), 0);
  if (ok != 1) throw Error(Errc::invalid_argument, "no usable host name for TLS: " + options.host);
}

}  // namespace

NetSocket::NetSocket(const SocketOptions& options, std::string peer, const std::stop_token& stop)
    : peer_(std::move(peer)), stall_timeout_(options.stall_timeout) {
  const Deadline deadline = std::chrono::steady_clock::now() + options.connect_timeout;
  fd_ = options.unix_path.empty() ? connect_tcp(options, deadline, stop)
                                  : connect_unix(options, deadline, stop);
  if (options.tls.enabled) start_tls(options, deadline, stop);
}

UniqueFd NetSocket::connect_tcp(const SocketOptions& options, Deadline deadline,
                                const std::stop_token& stop) {
  const AddressList addresses = resolve(options, peer_);
  std::exception_ptr first_error;
  for (const addrinfo* address = addresses.get(); address; address = address->ai_next) {
    try {
      UniqueFd fd = open_socket(address->ai_family, options, peer_);
      const int on = 1;
      ::setsockopt(fd.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
      ::setsockopt(fd.get(), SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
      if (::connect(fd.get(), address->ai_addr, address->ai_addrlen) != 0) {
        if (errno != EINPROGRESS) throw_errno("connect to", peer_, errno);
        finish_connect(fd.get(), deadline, stop);
      }
      return fd;
    } catch (const Error& error) {
      if (error.code() == Errc::cancelled) throw;
      if (!first_error) first_error = std::current_exception();
    }
  }
  if (first_error) std::rethrow_exception(first_error);
  fail("connect to", peer_, "the host has no address");
}

UniqueFd NetSocket::connect_unix(const SocketOptions& options, Deadline deadline,
                                 const std::stop_token& stop) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (options.unix_path.size() >= sizeof address.sun_path)
    throw Error(Errc::invalid_argument, "the path of the Unix socket is too long: " + peer_);
  std::memcpy(address.sun_path, options.unix_path.data(), options.unix_path.size());
  UniqueFd fd = open_socket(AF_UNIX, options, peer_);
  if (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
    if (errno != EINPROGRESS && errno != EAGAIN) throw_errno("connect to", peer_, errno);
    finish_connect(fd.get(), deadline, stop);
  }
  return fd;
}

void NetSocket::finish_connect(int fd, Deadline deadline, const std::stop_token& stop) {
  wait_ready(fd, POLLOUT, deadline, "connect to", stop);
  int err = 0;
  socklen_t nbytes = sizeof err;
  ::getsockopt(fd, SOL_SOCKET, SO_ERROR, &err, &nbytes);
  if (err != 0) throw_errno("connect to", peer_, err);
}

void NetSocket::start_tls(const SocketOptions& options, Deadline deadline,
                          const std::stop_token& stop) {
  context_ = make_context(options.tls);
  ssl_.reset(SSL_new(context_.get()));
  if (!ssl_) throw std::bad_alloc();
  BIO* bio = make_bio(fd_.get());
  SSL_set_bio(ssl_.get(), bio, bio);
  name_peer(ssl_.get(), options);
  while (true) {
    ERR_clear_error();
    const int result = SSL_connect(ssl_.get());
    if (result == 1) return;
    wait_tls(result, "start TLS with", deadline, stop);
  }
}

// After an OpenSSL call that returned `result` <= 0: waits until the call is worth repeating, or
// throws the reason.
void NetSocket::wait_tls(int result, const char* operation, Deadline deadline,
                         const std::stop_token& stop) {
  const int err = errno;
  switch (SSL_get_error(ssl_.get(), result)) {
    case SSL_ERROR_WANT_READ:
      return wait_ready(fd_.get(), POLLIN, deadline, operation, stop);
    case SSL_ERROR_WANT_WRITE:
      return wait_ready(fd_.get(), POLLOUT, deadline, operation, stop);
    case SSL_ERROR_ZERO_RETURN:
      fail(operation, peer_, "the server closed the connection");
    case SSL_ERROR_SYSCALL:
      if (err != 0 && ERR_peek_error() == 0) throw_errno(operation, peer_, err);
      if (ERR_peek_error() == 0) fail(operation, peer_, "the server closed the connection");
      break;
    default:
      break;
  }
  const long verdict = SSL_get_verify_result(ssl_.get());
  std::string reason = tls_reason();
  if (verdict != X509_V_OK)
    reason += std::string(" (") + X509_verify_cert_error_string(verdict) + ")";
  fail(operation, peer_, reason);
}

void NetSocket::wait_ready(int fd, short events, Deadline deadline, const char* operation,
                           const std::stop_token& stop) {
  while (true) {
    throw_if_stopped(stop);
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
        deadline - std::chrono::steady_clock::now());
    if (left.count() < 0) throw_errno(operation, peer_, ETIMEDOUT);
    pollfd entry{fd, events, 0};
    const auto wait = std::min(left, kStopPollInterval);
    const int ready = ::poll(&entry, 1, static_cast<int>(wait.count()) + 1);
    if (ready > 0) return;
    if (ready < 0 && errno != EINTR) throw_errno(operation, peer_, errno);
  }
}

size_t NetSocket::receive_some(Slice into, const std::stop_token& stop) {
  const Deadline deadline = stall_deadline();
  throw_if_stopped(stop);
  while (true) {
    if (ssl_) {
      ERR_clear_error();
      errno = 0;
      const int wanted = static_cast<int>(std::min<size_t>(into.size(), 1 << 30));
      const int n = SSL_read(ssl_.get(), into.data(), wanted);
      if (n > 0) return static_cast<size_t>(n);
      wait_tls(n, "receive from", deadline, stop);
    } else {
      const ssize_t n = ::recv(fd_.get(), into.data(), into.size(), 0);
      if (n > 0) return static_cast<size_t>(n);
      if (n == 0) fail("receive from", peer_, "the server closed the connection");
      if (would_block(errno))
        wait_ready(fd_.get(), POLLIN, deadline, "receive from", stop);
      else if (errno != EINTR)
        throw_errno("receive from", peer_, errno);
    }
  }
}

void NetSocket::send_all(ConstSlice from, const std::stop_token& stop) {
  Deadline deadline = stall_deadline();
  throw_if_stopped(stop);
  while (!from.empty()) {
    ssize_t n = 0;
    if (ssl_) {
      ERR_clear_error();
      errno = 0;
      n = SSL_write(ssl_.get(), from.data(),
                    static_cast<int>(std::min<size_t>(from.size(), 1 << 30)));
      if (n <= 0) wait_tls(static_cast<int>(n), "send to", deadline, stop);
    } else {
      n = ::send(fd_.get(), from.data(), from.size(), MSG_NOSIGNAL);
      if (n < 0 && would_block(errno))
        wait_ready(fd_.get(), POLLOUT, deadline, "send to", stop);
      else if (n < 0 && errno != EINTR)
        throw_errno("send to", peer_, errno);
    }
    if (n <= 0) continue;
    from = from.subspan(static_cast<size_t>(n));
    deadline = stall_deadline();
    throw_if_stopped(stop);
  }
}

}  // namespace tensorizer::io
