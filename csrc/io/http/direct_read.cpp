#include "io/http/direct_read.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "io/curl/curl_verdict.h"

namespace tensorizer::io {
namespace {

constexpr size_t kReceivedAtOnce = size_t{16} << 10;  // of a head
constexpr size_t kPlacesAtOnce = 64;
constexpr uint64_t kBodyAtOnce = uint64_t{8} << 20;  // between two looks at the stop token

struct HostAndPath {
  std::string host;
  uint16_t port = 0;
  std::string host_header;
  std::string path;  // with query
};

std::string part_of(CURLU* url, CURLUPart part, unsigned flags = 0) {
  char* text = nullptr;
  if (curl_url_get(url, part, &text, flags) != CURLUE_OK || text == nullptr) return {};
  std::string result = text;
  curl_free(text);
  return result;
}

std::optional<HostAndPath> taken_apart(const std::string& text) {
  const std::unique_ptr<CURLU, decltype(&curl_url_cleanup)> url(curl_url(), &curl_url_cleanup);
  if (!url || curl_url_set(url.get(), CURLUPART_URL, text.c_str(), 0) != CURLUE_OK)
    return std::nullopt;
  HostAndPath parts;
  const std::string host = part_of(url.get(), CURLUPART_HOST);
  const std::string named_port = part_of(url.get(), CURLUPART_PORT);
  const auto port = parse_decimal(part_of(url.get(), CURLUPART_PORT, CURLU_DEFAULT_PORT));
  // A zone id ("fe80::1%25eth0") needs more care than it is worth.
  if (host.empty() || !part_of(url.get(), CURLUPART_ZONEID).empty() || !port || *port == 0 ||
      *port > 65535)
    return std::nullopt;
  const bool ipv6 = host.front() == '[';
  parts.host = ipv6 ? host.substr(1, host.size() - 2) : host;
  parts.port = static_cast<uint16_t>(*port);
  parts.host_header = host + (named_port.empty() || *port == 80 ? "" : ":" + named_port);
  parts.path = part_of(url.get(), CURLUPART_PATH);
  if (const std::string query = part_of(url.get(), CURLUPART_QUERY); !query.empty())
    parts.path += "?" + query;
  const auto is_plain = [](unsigned char c) { return c > 0x20 && c < 0x7f; };
  if (!std::all_of(parts.path.begin(), parts.path.end(), is_plain)) return std::nullopt;
  return parts;
}

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

// nullopt where one of them is better left to libcurl.
std::optional<HttpHeaderList> fields_of(const HttpOptions& options, const HttpRequest& request) {
  HttpHeaderList fields;
  if (!request.send_credentials) return fields;
  if (request.further_headers != nullptr) fields = *request.further_headers;
  const size_t further = fields.size();
  for (const auto& field : options.headers)
    if (std::none_of(fields.begin(), fields.begin() + static_cast<ptrdiff_t>(further),
                     [&](const auto& f) { return equals_ignoring_case(f.first, field.first); }))
      fields.push_back(field);
  for (const auto& [name, value] : fields)
    if (is_reserved(name) || !is_one_line(name) || !is_one_line(value)) return std::nullopt;
  return fields;
}

std::string request_text(const HttpOptions& options, const HttpRequest& request,
                         const HostAndPath& target, const HttpHeaderList& fields) {
  std::string text =
      "GET " + target.path + " HTTP/1.1\r\nHost: " + target.host_header +
      "\r\nUser-Agent: " + options.user_agent +
      "\r\nAccept: */*\r\nAccept-Encoding: identity\r\nRange: bytes=" + request.range + "\r\n";
  for (const std::string& line : request.header_lines) text += line + "\r\n";
  for (const auto& [name, value] : fields) {
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
  for (const auto& [name, value] : head.headers.fields()) {
    if (equals_ignoring_case(name, "transfer-encoding")) return std::nullopt;
    if (!equals_ignoring_case(name, "content-length")) continue;
    if (length) return std::nullopt;
    length = parse_decimal(value);
    if (!length) return std::nullopt;
  }
  return length;
}

bool stays_open(const ResponseHead& head) {
  const auto connection = head.headers.find("connection");
  return !connection || equals_ignoring_case(*connection, "keep-alive");
}

// nullopt for what is not a well-formed head of HTTP/1.1.
std::optional<ResponseHead> parse_head(std::string_view text) {
  ResponseHead head;
  bool first = true;
  while (!text.empty()) {
    const size_t end = text.find("\r\n");
    const std::string_view line = text.substr(0, end);
    text.remove_prefix(end + 2);
    if (line.empty()) break;
    if (line.find_first_of(std::string_view("\r\n\0", 3)) != line.npos) return std::nullopt;
    if (first) {
      const auto status = parse_status_line(line);
      if (!line.starts_with("HTTP/1.1 ") || !status) return std::nullopt;
      head.status = *status;
      head.status_line = printable(line);
      first = false;
      continue;
    }
    auto field = parse_header_line(line);
    if (!field || line.front() == ' ' || line.front() == '\t') return std::nullopt;
    head.headers.add(std::move(field->first), std::move(field->second));
  }
  return head;
}

ConnectOptions connect_options(const HttpOptions& options, const HostAndPath& target) {
  ConnectOptions connect;
  connect.host = target.host;
  connect.port = target.port;
  connect.connect_timeout = options.connect_timeout;
  return connect;
}

}  // namespace

std::unique_ptr<DirectRead> DirectRead::begin(CurlLane& lane, const HttpOptions& options,
                                              const HttpRequest& request, Accept accept,
                                              ScatterCursor& into, HttpCounters& counters) {
  const HttpUrl& url = *request.url;
  if (url.is_https() || options.version == HttpVersion::http2 || request.body ||
      request.range.empty() || (request.send_credentials && url.has_credentials()) ||
      !is_one_line(options.user_agent) || options.user_agent.empty() ||
      !options.proxy.value_or("").empty())
    return nullptr;
  const std::optional<HttpHeaderList> fields = fields_of(options, request);
  const std::optional<HostAndPath> target = taken_apart(url.text());
  if (!fields || !target) return nullptr;
  return std::unique_ptr<DirectRead>(new DirectRead(
      lane, options, connect_options(options, *target),
      request_text(options, request, *target, *fields), std::move(accept), into, counters));
}

bool DirectRead::knows(const ResponseHead& head) {
  return head.status_line.starts_with("HTTP/1.1 ") && body_length(head);
}

DirectRead::DirectRead(CurlLane& lane, const HttpOptions& options, ConnectOptions connect_options,
                       std::string request_text, Accept accept, ScatterCursor& into,
                       HttpCounters& counters)
    : lane_(lane),
      accept_(std::move(accept)),
      into_(into),
      counters_(counters),
      connect_options_(std::move(connect_options)),
      request_text_(std::move(request_text)),
      watch_(options) {
  counters_.requests.fetch_add(1, std::memory_order_relaxed);
  connect();
}

DirectRead::~DirectRead() { lane_.watch(CURL_SOCKET_BAD, 0); }

void DirectRead::connect() {
  step_ = Step::connect;
  sent_ = 0;
  head_text_.clear();
  reused_ = take_connection();
  if (!reused_) connection_ = std::make_unique<CurlConnection>(lane_, connect_options_);
}

// The one that waits in the lane, if it leads to the same place and is still open.
bool DirectRead::take_connection() {
  connection_ = std::move(lane_.kept_connection());
  return connection_ && connection_->leads_to(connect_options_) && connection_->is_quiet();
}

DirectRead::Outcome DirectRead::check() {
  switch (step_) {
    case Step::connect:
      watch_.restart(heard_);  // connecting has its own timeout
      if (!connection_->done()) return Outcome::running;
      if (connection_->code() != CURLE_OK) {
        const CURLcode code = connection_->code();
        throw failure_of_curl(code, printable(connection_->error_text(code), 300));
      }
      if (!reused_) counters_.connections.fetch_add(1, std::memory_order_relaxed);
      step_ = Step::send;
      sent_at_ = Clock::now();
      [[fallthrough]];
    case Step::send:
      return send_request();
    case Step::head:
      return receive_head();
    case Step::error_body:
      return receive_error_body();
    case Step::body:
      return receive_body();
    case Step::over:
      break;
  }
  return Outcome::complete;
}

DirectRead::Outcome DirectRead::wait_for(short events) {
  watch_.check(heard_, head_.status);
  lane_.watch(connection_->socket(), events);
  return Outcome::running;
}

// A server may close a connection that waits at the moment in which we use it.
bool DirectRead::try_another_connection() {
  if (!reused_ || !head_text_.empty()) return false;
  lane_.watch(CURL_SOCKET_BAD, 0);
  connection_.reset();
  connect();
  return true;
}

void DirectRead::fail_broken(const std::string& reason) const {
  HttpFailure failure{Errc::io, reason, "the connection broke", head_.status};
  failure.transient = true;
  failure.reached = true;
  throw failure;
}

DirectRead::Outcome DirectRead::send_request() {
  while (sent_ < request_text_.size()) {
    const ssize_t sent = ::send(connection_->socket(), request_text_.data() + sent_,
                                request_text_.size() - sent_, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent >= 0) {
      sent_ += static_cast<size_t>(sent);
      continue;
    }
    if (errno == EINTR) continue;
    if (errno == EAGAIN || errno == EWOULDBLOCK) return wait_for(POLLOUT);
    const int error = errno;
    if (try_another_connection()) return Outcome::running;
    fail_broken(std::string("the request could not be sent: ") + std::strerror(error));
  }
  step_ = Step::head;
  return wait_for(POLLIN);
}

std::optional<size_t> DirectRead::judge_received(ssize_t result) {
  if (result >= 0) {
    heard_ += static_cast<uint64_t>(result);
    return static_cast<size_t>(result);
  }
  if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) return std::nullopt;
  const std::string reason = std::strerror(errno);
  if (step_ == Step::body)
    fail_broken("the body ended after " + std::to_string(received_) + " bytes: " + reason);
  return 0;
}

DirectRead::Outcome DirectRead::receive_head() {
  std::array<char, kReceivedAtOnce> buffer;
  const auto got =
      judge_received(::recv(connection_->socket(), buffer.data(), buffer.size(), MSG_DONTWAIT));
  if (!got) return wait_for(POLLIN);
  if (*got == 0) {
    if (try_another_connection()) return Outcome::running;
    fail_broken(head_text_.empty() ? "the server closed the connection without a response"
                                   : "the response ended within its head");
  }
  const size_t before = head_text_.size();
  head_text_.append(buffer.data(), *got);
  // The end may lie across two receptions.
  const size_t end = head_text_.find("\r\n\r\n", before < 3 ? 0 : before - 3);
  if (end != head_text_.npos) return head_is_complete(end + 4);
  const std::string_view kStart = "HTTP/1.1 ";
  const bool is_http =
      std::string_view(head_text_).substr(0, kStart.size()) == kStart.substr(0, head_text_.size());
  if (!is_http || head_text_.size() > kMaxHeadNbytes) return unfit();
  return wait_for(POLLIN);
}

DirectRead::Outcome DirectRead::head_is_complete(size_t head_nbytes) {
  auto head = parse_head(std::string_view(head_text_).substr(0, head_nbytes));
  if (!head) return unfit();
  if (head->status < 200) {  // another head follows
    head_text_.erase(0, head_nbytes);
    const size_t end = head_text_.find("\r\n\r\n");
    return end == head_text_.npos ? wait_for(POLLIN) : head_is_complete(end + 4);
  }
  const auto length = body_length(*head);
  const bool is_error = head->status >= 400 && head->status != 416;
  if (!length || (head->status != 206 && !is_error)) return unfit();
  head_ = std::move(*head);
  body_nbytes_ = *length;
  to_first_byte_ = Clock::now() - sent_at_;
  counters_.answered.store(true, std::memory_order_relaxed);
  head_text_.erase(0, head_nbytes);
  if (is_error) {
    step_ = Step::error_body;
    return receive_error_body();
  }
  accept_(head_);
  const size_t there = static_cast<size_t>(std::min<uint64_t>(head_text_.size(), body_nbytes_));
  into_.put(std::as_bytes(std::span(head_text_.data(), there)));
  received_ = there;
  counters_.bytes.fetch_add(there, std::memory_order_relaxed);
  if (there < head_text_.size()) connection_.reset();  // more than the response
  step_ = Step::body;
  return receive_body();
}

DirectRead::Outcome DirectRead::receive_error_body() {
  const uint64_t wanted = std::min<uint64_t>(body_nbytes_, kKeptErrorNbytes);
  while (head_text_.size() < wanted) {
    std::array<char, kKeptErrorNbytes> buffer;
    const auto got =
        judge_received(::recv(connection_->socket(), buffer.data(), buffer.size(), MSG_DONTWAIT));
    if (!got) return wait_for(POLLIN);
    if (*got == 0) break;  // does not change what the error is
    head_text_.append(buffer.data(), *got);
  }
  if (head_text_.size() == body_nbytes_) end();
  throw failure_of_status(head_, std::string_view(head_text_).substr(0, kKeptErrorNbytes));
}

DirectRead::Outcome DirectRead::receive_body() {
  std::array<iovec, kPlacesAtOnce> places;
  const uint64_t begun = received_;
  while (received_ < body_nbytes_) {
    if (received_ - begun >= kBodyAtOnce) return wait_for(POLLIN);
    msghdr message{};
    message.msg_iov = places.data();
    message.msg_iovlen = into_.places(places, body_nbytes_ - received_);
    const auto got = judge_received(::recvmsg(connection_->socket(), &message, MSG_DONTWAIT));
    if (!got) return wait_for(POLLIN);
    if (*got == 0)
      fail_broken("the body ended after " + std::to_string(received_) + " of " +
                  std::to_string(body_nbytes_) + " bytes");
    note_received(*got);
  }
  return end();
}

void DirectRead::note_received(size_t nbytes) noexcept {
  into_.skip(nbytes);
  received_ += nbytes;
  counters_.bytes.fetch_add(nbytes, std::memory_order_relaxed);
}

// Keeps the connection for the next request.
DirectRead::Outcome DirectRead::end() {
  step_ = Step::over;
  lane_.watch(CURL_SOCKET_BAD, 0);
  if (connection_ && stays_open(head_)) lane_.kept_connection() = std::move(connection_);
  connection_.reset();
  return Outcome::complete;
}

DirectRead::Outcome DirectRead::unfit() {
  step_ = Step::over;
  lane_.watch(CURL_SOCKET_BAD, 0);
  connection_.reset();
  return Outcome::unfit;
}

}  // namespace tensorizer::io
