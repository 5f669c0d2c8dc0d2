#include "io/http/direct_read.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "core/error.h"

namespace tensorizer::io {
namespace {

constexpr size_t kHeadAtOnce = size_t{16} << 10;
constexpr size_t kPlacesAtOnce = 64;
constexpr int kPollMs = 100;

// The fields that we write ourselves, and those that change how a message is framed.
bool is_reserved(const std::string& name) {
  for (const char* reserved :
       {"host", "range", "connection", "content-length", "transfer-encoding", "te", "upgrade",
        "expect", "accept", "user-agent", "accept-encoding", "proxy-authorization"})
    if (equals_ignoring_case(name, reserved)) return true;
  return false;
}

bool is_one_line(const std::string& text) {
  return std::none_of(text.begin(), text.end(),
                      [](unsigned char c) { return c < 0x20 && c != '\t'; });
}

// Empty where the request is better left to libcurl.
std::string request_text(const HttpOptions& options, const HttpRequest& request) {
  const HttpUrl& url = *request.url;
  const auto is_plain = [](unsigned char c) { return c > 0x20 && c < 0x7f; };
  const std::string& path = url.path_and_query;
  if (url.is_https() || options.version == HttpVersion::http2 ||
      (request.send_credentials && url.has_credentials()) || url.host.empty() || url.port == 0 ||
      !is_one_line(options.user_agent) || options.user_agent.empty() ||
      !options.proxy.value_or("").empty() || !std::all_of(path.begin(), path.end(), is_plain))
    return {};
  const std::string host =
      url.host.find(':') == std::string::npos ? url.host : "[" + url.host + "]";
  std::string text =
      "GET " + path + " HTTP/1.1\r\nHost: " + host +
      (url.port == 80 ? "" : ":" + std::to_string(url.port)) +
      "\r\nUser-Agent: " + options.user_agent +
      "\r\nAccept: */*\r\nAccept-Encoding: identity\r\nRange: bytes=" + request.range + "\r\n";
  for (const std::string& line : request.header_lines) text += line + "\r\n";
  for (const auto& [name, value] : fields_of(options, request)) {
    if (is_reserved(name) || !is_one_line(name) || !is_one_line(value)) return {};
    text += name;
    text += value.empty() ? ":" : ": ";
    text += value;
    text += "\r\n";
  }
  return text + "\r\n";
}

// The length of a body that we know how to read; nullopt for every other framing.
std::optional<uint64_t> body_length(const ResponseHead& head) {
  std::optional<uint64_t> length;
  for (const auto& [name, value] : head.headers) {
    if (equals_ignoring_case(name, "transfer-encoding")) return std::nullopt;
    if (!equals_ignoring_case(name, "content-length")) continue;
    if (length) return std::nullopt;
    length = parse_decimal(value);
    if (!length) return std::nullopt;
  }
  return length;
}

// nullopt for what is not a well-formed head of HTTP/1.1.
std::optional<ResponseHead> parse_head(std::string_view text,
                                       std::span<const std::string> secrets) {
  ResponseHead head;
  while (!text.empty()) {
    const size_t end = text.find("\r\n");
    const std::string_view line = text.substr(0, end);
    text.remove_prefix(end + 2);
    if (line.empty()) break;
    if (line.find_first_of(std::string_view("\r\n\0", 3)) != line.npos) return std::nullopt;
    if (head.status == 0) {
      const auto status = parse_status_line(line);
      if (!line.starts_with("HTTP/1.1 ") || !status) return std::nullopt;
      head.status = *status;
      head.status_line = printable(without_secrets(std::string(line), secrets));
      continue;
    }
    auto field = parse_header_line(line);
    if (!field || line.front() == ' ' || line.front() == '\t') return std::nullopt;
    head.headers.push_back(std::move(*field));
  }
  return head;
}

// One request on one connection.
class Exchange {
 public:
  Exchange(const DirectRead& read, CurlSocket& socket, const std::stop_token& stop)
      : read_(read),
        socket_(socket),
        stop_(stop),
        watch_(read.client.options),
        secrets_(secrets_of(read.client.options, read.request)) {}

  // False where the connection broke.
  bool send(const std::string& text) {
    try {
      socket_.send_all(std::as_bytes(std::span(text)), stop_);
      return true;
    } catch (const SocketError&) {
      return false;
    }
  }

  // All up to the end of a head that is not interim, and what came with it, is in `text` then; the
  // result is nullopt where it is none of HTTP/1.1. False where the connection broke before.
  bool receive_head(std::optional<ResponseHead>& head) {
    constexpr std::string_view kStart = "HTTP/1.1 ";
    for (size_t interim_nbytes = 0;;) {
      const size_t end = text.find("\r\n\r\n");
      if (end != text.npos) {
        auto found = parse_head(std::string_view(text).substr(0, end + 4), secrets_);
        text.erase(0, end + 4);
        interim_nbytes += end + 4;
        if (found && found->status < 200) continue;
        head = std::move(found);
        return true;
      }
      if (std::string_view(text).substr(0, kStart.size()) != kStart.substr(0, text.size()) ||
          interim_nbytes + text.size() > kMaxHeadNbytes)
        return true;
      if (!receive_text()) return false;
    }
  }

  // False at the end of the connection.
  bool receive_text() {
    std::array<char, kHeadAtOnce> buffer;
    iovec place{buffer.data(), buffer.size()};
    const size_t n = receive(&place, 1);
    text.append(buffer.data(), n);
    return n > 0;
  }

  // Zero at the end of the connection.
  size_t receive(iovec* places, size_t count) {
    for (;;) {
      read_.meanwhile();
      throw_if_stopped(stop_);
      msghdr message{};
      message.msg_iov = places;
      message.msg_iovlen = count;
      const ssize_t n = ::recvmsg(socket_.descriptor(), &message, MSG_DONTWAIT);
      if (n >= 0) {
        heard_ += static_cast<uint64_t>(n);
        return static_cast<size_t>(n);
      }
      if (!wait()) return 0;
    }
  }

  std::string text;
  std::string broke;  // why the connection did, where the system says

 private:
  // Behind a call that would have had to wait; false where it failed.
  bool wait() {
    if (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR) {
      broke = std::strerror(errno);
      return false;
    }
    watch_.check(heard_, heard_ > 0, 0);
    pollfd entry{socket_.descriptor(), POLLIN, 0};
    ::poll(&entry, 1, kPollMs);
    return true;
  }

  const DirectRead& read_;
  CurlSocket& socket_;
  const std::stop_token& stop_;
  StallWatch watch_;
  const std::vector<std::string> secrets_;
  uint64_t heard_ = 0;
};

[[noreturn]] void fail_broken(const std::string& reason, int status) {
  throw HttpFailure{.reason = reason,
                    .hint = "the connection broke",
                    .status = status,
                    .transient = true,
                    .reached = true};
}

void receive_body(Exchange& exchange, const DirectRead& read, const ResponseHead& head,
                  uint64_t nbytes) {
  const size_t there = std::min<uint64_t>(exchange.text.size(), nbytes);
  std::atomic<uint64_t>& counted = read.client.counters.bytes;
  read.into.put(std::as_bytes(std::span(exchange.text.data(), there)));
  counted.fetch_add(there, std::memory_order_relaxed);
  exchange.text.erase(0, there);
  std::array<iovec, kPlacesAtOnce> places;
  for (uint64_t received = there; received < nbytes;) {
    const size_t n = exchange.receive(places.data(), read.into.places(places, nbytes - received));
    if (n == 0)
      fail_broken("the body ended after " + std::to_string(received) +
                      (exchange.broke.empty() ? " of " + std::to_string(nbytes) + " bytes"
                                              : " bytes: " + exchange.broke),
                  head.status);
    read.into.skip(n);
    received += n;
    counted.fetch_add(n, std::memory_order_relaxed);
  }
}

std::unique_ptr<CurlSocket> connect(const DirectRead& read, const SocketOptions& target,
                                    const std::stop_token& stop) {
  try {
    auto socket = std::make_unique<CurlSocket>(target, target.host, stop, read.meanwhile);
    read.client.counters.connections.fetch_add(1, std::memory_order_relaxed);
    return socket;
  } catch (const SocketError& error) {
    throw failure_of_curl(error.code, printable(error.curl_text, 300), error.system_errno);
  }
}

// An error that is not to be mistaken; its body may name it.
[[noreturn]] void fail_with_status(Exchange& exchange, const ResponseHead& head, uint64_t nbytes) {
  const uint64_t wanted = std::min<uint64_t>(nbytes, kKeptErrorNbytes);
  while (exchange.text.size() < wanted && exchange.receive_text()) {
  }
  throw failure_of_status(head, std::string_view(exchange.text).substr(0, kKeptErrorNbytes));
}

}  // namespace

bool can_be_read_directly(const HttpOptions& options, const HttpRequest& request) {
  return !request_text(options, request).empty();
}

bool is_direct_framing(const ResponseHead& head) {
  return head.status_line.starts_with("HTTP/1.1 ") && body_length(head);
}

bool direct_read(std::unique_ptr<CurlSocket>& kept, const DirectRead& read,
                 const std::stop_token& stop) {
  const HttpOptions& options = read.client.options;
  HttpCounters& counters = read.client.counters;
  const std::string text = request_text(options, read.request);
  if (text.empty()) return false;
  SocketOptions target;
  target.host = lower_case(read.request.url->host);
  target.port = read.request.url->port;
  target.connect_timeout = options.connect_timeout;
  target.stall_timeout = options.stall_timeout;
  counters.requests.fetch_add(1, std::memory_order_relaxed);
  std::unique_ptr<CurlSocket> socket = std::move(kept);
  bool reused = socket && socket->leads_to(target) && socket->is_quiet();
  for (;; reused = false) {
    if (!reused) {
      socket.reset();  // first: there is one connection at a time
      socket = connect(read, target, stop);
    }
    Exchange exchange(read, *socket, stop);
    std::optional<ResponseHead> head;
    if (!exchange.send(text) || !exchange.receive_head(head)) {
      // A server may close a connection that waits at the moment in which we use it.
      if (reused && exchange.text.empty()) continue;
      fail_broken(exchange.text.empty() ? "the server closed the connection without a response"
                                        : "the response ended within its head",
                  0);
    }
    const auto length = head ? body_length(*head) : std::nullopt;
    const bool is_error = length && head->status >= 400 && head->status != 416;
    if (!length || (head->status != 206 && !is_error)) {
      read.client.indirect_reads.store(kIndirectReads);
      return false;
    }
    counters.answered.store(true, std::memory_order_relaxed);
    if (is_error) fail_with_status(exchange, *head, *length);
    read.accept(*head);
    receive_body(exchange, read, *head, *length);
    const auto connection = find_field(head->headers, "connection");
    const bool stays_open = !connection || equals_ignoring_case(*connection, "keep-alive");
    if (stays_open && exchange.text.empty()) kept = std::move(socket);
    return true;
  }
}

}  // namespace tensorizer::io
