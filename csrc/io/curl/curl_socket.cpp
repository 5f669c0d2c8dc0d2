#include "io/curl/curl_socket.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>

#include "core/stop.h"
#include "io/curl/curl_verdict.h"

namespace tensorizer::io {
namespace {

constexpr std::chrono::milliseconds kStopPollInterval{100};

}  // namespace

CurlSocket::CurlSocket(const SocketOptions& options, std::string peer, const std::stop_token& stop)
    : peer_(std::move(peer)),
      stall_timeout_(options.stall_timeout),
      tls_(options.tls),
      connection_(lane_, options) {
  drive(lane_, stop, [this] { return connection_.done(); });
  if (connection_.code() != CURLE_OK) fail("connect to", connection_.code());
  socket_ = connection_.socket();
}

void CurlSocket::fail(const char* operation, CURLcode code) const {
  std::string text = connection_.error_text(code);
  const CurlVerdict verdict = curl_verdict(code, text);
  long system_errno = 0;
  if (code == CURLE_COULDNT_CONNECT || code == CURLE_SEND_ERROR || code == CURLE_RECV_ERROR)
    curl_easy_getinfo(connection_.easy(), CURLINFO_OS_ERRNO, &system_errno);
  if (code == CURLE_OPERATION_TIMEDOUT) system_errno = ETIMEDOUT;
  if (system_errno != 0) text += std::string(": ") + std::strerror(static_cast<int>(system_errno));
  // Hints of other errors speak of HTTP.
  if (code == CURLE_PEER_FAILED_VERIFICATION || code == CURLE_SSL_CACERT_BADFILE)
    text += std::string("; ") + verdict.hint;
  SocketError error(std::string(operation) + " " + peer_ + ": " + text, peer_, verdict.transient);
  error.system_errno = static_cast<int>(system_errno);
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
    const auto wait = std::min(left, kStopPollInterval);
    const int ready = ::poll(&entry, 1, static_cast<int>(wait.count()) + 1);
    if (ready > 0) return;
    if (ready < 0 && errno != EINTR) throw_errno(operation, peer_, errno);
  }
}

size_t CurlSocket::receive_some(Slice into, const std::stop_token& stop) {
  const Deadline deadline = stall_deadline();
  throw_if_stopped(stop);
  while (true) {
    size_t received = 0;
    std::optional<SigpipeGuard> guard;
    if (tls_) guard.emplace();  // TLS may have to answer
    const CURLcode code = curl_easy_recv(connection_.easy(), into.data(), into.size(), &received);
    guard.reset();
    if (code == CURLE_OK && received > 0) return received;
    if (code == CURLE_OK)
      throw SocketError("receive from " + peer_ + ": the server closed the connection", peer_,
                        true);
    if (code != CURLE_AGAIN) fail("receive from", code);
    wait_ready(POLLIN, deadline, "receive from", stop);
  }
}

void CurlSocket::send_all(ConstSlice from, const std::stop_token& stop) {
  Deadline deadline = stall_deadline();
  throw_if_stopped(stop);
  while (!from.empty()) {
    size_t sent = 0;
    CURLcode code = CURLE_OK;
    {
      const SigpipeGuard guard;
      code = curl_easy_send(connection_.easy(), from.data(), from.size(), &sent);
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
