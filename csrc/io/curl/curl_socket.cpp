#include "io/curl/curl_socket.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>

#include "core/error.h"

namespace tensorizer::io {
namespace {

constexpr int kStopPollMs = 100;

std::string url_of(const SocketOptions& options) {
  const std::string scheme = options.tls ? "https://" : "http://";
  const bool ipv6 = options.host.find(':') != std::string::npos;
  return scheme + (ipv6 ? "[" + options.host + "]" : options.host) + ":" +
         std::to_string(options.port) + "/";
}

int set_receive_buffer(void* nbytes, curl_socket_t socket, curlsocktype) noexcept {
  if (*static_cast<const int*>(nbytes) > 0)
    setsockopt(socket, SOL_SOCKET, SO_RCVBUF, nbytes, sizeof(int));
  return CURL_SOCKOPT_OK;
}

}  // namespace

CurlSocket::CurlSocket(const SocketOptions& options, std::string peer, const std::stop_token& stop)
    : peer_(std::move(peer)),
      url_(url_of(options)),
      stall_timeout_(options.stall_timeout),
      receive_buffer_nbytes_(options.receive_buffer_nbytes),
      tls_(options.tls) {
  if (!connection_.multi) throw std::bad_alloc();
  configure(options);
  const CURLcode code = connect(stop);
  if (code != CURLE_OK) fail("connect to", code);
  curl_easy_getinfo(easy(), CURLINFO_ACTIVESOCKET, &socket_);
  if (socket_ == CURL_SOCKET_BAD) fail("connect to", CURLE_COULDNT_CONNECT);
}

void CurlSocket::configure(const SocketOptions& options) {
  CURL* easy = this->easy();
  curl_easy_setopt(easy, CURLOPT_ERRORBUFFER, error_text_);
  apply_common_options(easy, options.connect_timeout);
  apply_trust(easy, options.trust);
  curl_easy_setopt(easy, CURLOPT_URL, url_.c_str());
  curl_easy_setopt(easy, CURLOPT_CONNECT_ONLY, 1L);
  curl_easy_setopt(easy, CURLOPT_PROXY, "");  // those of the environment are for libcurl's HTTP
  curl_easy_setopt(easy, CURLOPT_HTTP_VERSION, static_cast<long>(CURL_HTTP_VERSION_1_1));
  curl_easy_setopt(easy, CURLOPT_SSL_ENABLE_ALPN, 0L);
  curl_easy_setopt(easy, CURLOPT_SSLVERSION, static_cast<long>(CURL_SSLVERSION_TLSv1_2));
  curl_easy_setopt(easy, CURLOPT_SOCKOPTFUNCTION, &set_receive_buffer);
  curl_easy_setopt(easy, CURLOPT_SOCKOPTDATA, &receive_buffer_nbytes_);
}

CurlSocket::Connection::~Connection() {
  if (!owner.is_this_one()) {
    (void)easy.release();
    (void)multi.release();
    return;
  }
  const SigpipeGuard guard;
  curl_multi_remove_handle(multi.get(), easy.get());
  easy.reset();
  multi.reset();
}

// By a multi handle, which a stop can wake.
CURLcode CurlSocket::connect(const std::stop_token& stop) {
  CURLM* const multi = connection_.multi.get();
  const SigpipeGuard guard;
  const std::stop_callback wake(stop, [multi] { curl_multi_wakeup(multi); });
  CURLMcode code = curl_multi_add_handle(multi, easy());
  while (code == CURLM_OK) {
    int running = 0, left = 0;
    code = curl_multi_perform(multi, &running);
    if (const CURLMsg* const message = curl_multi_info_read(multi, &left))
      return message->data.result;
    throw_if_stopped(stop);
    if (code == CURLM_OK) code = curl_multi_poll(multi, nullptr, 0, kStopPollMs, nullptr);
  }
  throw Error(Errc::io, std::string("libcurl: ") + curl_multi_strerror(code));
}

bool CurlSocket::is_quiet() const noexcept {
  char byte = 0;
  return ::recv(socket_, &byte, 1, MSG_PEEK | MSG_DONTWAIT) < 0 &&
         (errno == EAGAIN || errno == EWOULDBLOCK);
}

void CurlSocket::fail(const char* operation, CURLcode code) const {
  std::string text = curl_error_text(error_text_, code);
  const CurlVerdict verdict = curl_verdict(code, text);
  const int system_errno =
      code == CURLE_OPERATION_TIMEDOUT ? ETIMEDOUT : curl_system_errno(easy(), code);
  if (system_errno != 0) text += std::string(": ") + std::strerror(system_errno);
  // Hints of other errors speak of HTTP.
  if (code == CURLE_PEER_FAILED_VERIFICATION || code == CURLE_SSL_CACERT_BADFILE)
    text += std::string("; ") + verdict.hint;
  SocketError error(std::string(operation) + " " + peer_ + ": " + text, peer_, verdict.transient);
  error.system_errno = system_errno;
  throw error;
}

void CurlSocket::fail_silent(const char* operation) const {
  SocketError error(std::string(operation) + " " + peer_ + ": timed out: no byte in " +
                        std::to_string(stall_timeout_.count()) + " ms",
                    peer_, true);
  error.system_errno = ETIMEDOUT;
  throw error;
}

void CurlSocket::wait_ready(short events, Deadline deadline, const char* operation,
                            const std::stop_token& stop) const {
  while (true) {
    throw_if_stopped(stop);
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
        deadline - std::chrono::steady_clock::now());
    if (left.count() < 0) fail_silent(operation);
    pollfd entry{socket_, events, 0};
    const auto wait = std::min(left, std::chrono::milliseconds(kStopPollMs));
    const int ready = ::poll(&entry, 1, static_cast<int>(wait.count()) + 1);
    if (ready > 0) return;
    if (ready < 0 && errno != EINTR) throw_errno(operation, peer_, errno);
  }
}

size_t CurlSocket::receive_some(Buffer into, const std::stop_token& stop) {
  const Deadline deadline = stall_deadline();
  throw_if_stopped(stop);
  while (true) {
    size_t received = 0;
    std::optional<SigpipeGuard> guard;
    if (tls_) guard.emplace();  // TLS may have to answer
    const CURLcode code = curl_easy_recv(easy(), into.data(), into.size(), &received);
    guard.reset();
    if (code == CURLE_OK && received > 0) return received;
    if (code == CURLE_OK)
      throw SocketError("receive from " + peer_ + ": the server closed the connection", peer_,
                        true);
    if (code != CURLE_AGAIN) fail("receive from", code);
    wait_ready(POLLIN, deadline, "receive from", stop);
  }
}

void CurlSocket::send_all(ConstBuffer from, const std::stop_token& stop) {
  Deadline deadline = stall_deadline();
  throw_if_stopped(stop);
  while (!from.empty()) {
    size_t sent = 0;
    CURLcode code = CURLE_OK;
    {
      const SigpipeGuard guard;
      code = curl_easy_send(easy(), from.data(), from.size(), &sent);
    }
    if (code == CURLE_AGAIN) {
      wait_ready(POLLOUT, deadline, "send to", stop);
      continue;
    }
    if (code != CURLE_OK) fail("send to", code);
    from = from.subspan(sent);
    deadline = stall_deadline();
    throw_if_stopped(stop);
  }
}

}  // namespace tensorizer::io
