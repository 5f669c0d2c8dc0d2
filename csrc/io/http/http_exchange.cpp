#include "io/http/http_exchange.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

namespace tensorizer::io {
namespace {

// A longer body of an error is not waited for.
constexpr size_t kMaxErrorNbytes = size_t{256} << 10;
constexpr long kReceiveBufferNbytes = 256 << 10;
constexpr long kSendBufferNbytes = 256 << 10;
// A body that stands still for so long may come sooner over another connection.
constexpr std::chrono::seconds kBodyStall{2};
// After so many bytes, or so long, the thread that waits says how far it is.
constexpr uint64_t kTellNbytes = uint64_t{256} << 10;
constexpr std::chrono::seconds kTellAfter{1};

// As libcurl counts them.
long whole_seconds(std::chrono::milliseconds time) noexcept {
  return std::max<long>(1,
                        static_cast<long>(std::chrono::ceil<std::chrono::seconds>(time).count()));
}

// Settings that all requests share: connecting, TLS, proxies, HTTP version.
void apply_connection_options(CURL* easy, const HttpOptions& options, const HttpUrl& url) {
  apply_common_options(easy, options.connect_timeout);
  apply_trust(easy, url.is_https() && options.find_trust ? options.find_trust() : options.trust);
  curl_easy_setopt(easy, CURLOPT_FOLLOWLOCATION, 0L);
  curl_easy_setopt(easy, CURLOPT_SUPPRESS_CONNECT_HEADERS, 1L);
  curl_easy_setopt(easy, CURLOPT_BUFFERSIZE, kReceiveBufferNbytes);
  curl_easy_setopt(easy, CURLOPT_LOW_SPEED_LIMIT, kMinBytesPerSecond);
  curl_easy_setopt(easy, CURLOPT_LOW_SPEED_TIME, whole_seconds(options.stall_timeout));
  const long version = options.version == HttpVersion::http1   ? CURL_HTTP_VERSION_1_1
                       : options.version == HttpVersion::http2 ? CURL_HTTP_VERSION_2_0
                                                               : CURL_HTTP_VERSION_2TLS;
  curl_easy_setopt(easy, CURLOPT_HTTP_VERSION, version);
  if (options.proxy) curl_easy_setopt(easy, CURLOPT_PROXY, options.proxy->c_str());
}

// The headers of the caller that go with a request; `further_headers` replace options of the name.
HttpHeaderList fields_of(const HttpOptions& options, const HttpRequest& request) {
  HttpHeaderList fields;
  if (!request.send_credentials) return fields;
  if (request.further_headers) fields = *request.further_headers;
  for (const auto& field : options.headers)
    if (!find_field(fields, field.first)) fields.push_back(field);
  return fields;
}

// What a request holds that no message may tell.
std::vector<std::string> secrets_of(const HttpOptions& options, const HttpRequest& request) {
  const HttpUrl& url = *request.url;
  std::vector<std::string> secrets{url.query, options.proxy.value_or("")};
  if (request.send_credentials) secrets.insert(secrets.end(), {url.user, url.password});
  for (auto& [name, value] : fields_of(options, request)) secrets.push_back(value);
  return secrets;
}

}  // namespace

HttpFailure failure_of_curl(CURLcode code, const std::string& text, int system_errno) {
  const CurlVerdict verdict = curl_verdict(code, text);
  HttpFailure failure{.reason = text + " (" + verdict.name + ")",
                      .hint = verdict.hint,
                      .transient = verdict.transient};
  if (system_errno == EMFILE || system_errno == ENFILE) {
    failure.reason += std::string(": ") + std::strerror(system_errno);
    failure.hint = kTooManyFilesHint;
  }
  return failure;
}

HttpExchange::HttpExchange(const HttpOptions& options, const HttpRequest& request, Accept accept,
                           HttpCounters& counters)
    : options_(options),
      reactor_(HttpReactor::of_process()),
      counters_(counters),
      gives_up_stalled_body_(request.gives_up_stalled_body),
      secrets_(secrets_of(options, request)),
      accept_(std::move(accept)) {
  configure(request);
  counters_.requests.fetch_add(1, std::memory_order_relaxed);
  reactor_.start(*this, options.max_connections);
}

HttpExchange::~HttpExchange() {
  if (&reactor_ != &HttpReactor::of_process()) {
    leave_to_parent();
    return;
  }
  MutexLock lock(mutex_);
  if (end_) return;
  reactor_.cancel(*this);
  changed_.wait(mutex_, {}, [this]() REQUIRES_LOCK(mutex_) { return end_.has_value(); });
}

void HttpExchange::configure(const HttpRequest& request) {
  CURL* easy = this->easy();
  const HttpUrl& url = *request.url;
  curl_easy_setopt(easy, CURLOPT_ERRORBUFFER, error_text_);
  apply_connection_options(easy, options_, url);
  curl_easy_setopt(easy, CURLOPT_URL, url.text.c_str());
  curl_easy_setopt(easy, CURLOPT_PATH_AS_IS, 1L);  // HttpUrl has resolved what is to be
  curl_easy_setopt(easy, CURLOPT_USERAGENT, options_.user_agent.c_str());
  configure_headers(request);
  if (request.send_credentials && url.has_credentials()) {
    curl_easy_setopt(easy, CURLOPT_HTTPAUTH, static_cast<long>(CURLAUTH_BASIC));
    curl_easy_setopt(easy, CURLOPT_USERNAME, url.user.c_str());
    curl_easy_setopt(easy, CURLOPT_PASSWORD, url.password.c_str());
    sends_password_ = true;
  }
  if (request.body) configure_upload(*request.body);
  curl_easy_setopt(easy, CURLOPT_HTTPHEADER, header_lines_.get());
  curl_easy_setopt(easy, CURLOPT_HEADERFUNCTION, &on_data<&HttpExchange::take_header_line>);
  curl_easy_setopt(easy, CURLOPT_HEADERDATA, this);
  curl_easy_setopt(easy, CURLOPT_WRITEFUNCTION, &on_data<&HttpExchange::take_body>);
  curl_easy_setopt(easy, CURLOPT_WRITEDATA, this);
}

void HttpExchange::configure_headers(const HttpRequest& request) {
  const HttpHeaderList fields = fields_of(options_, request);
  if (!find_field(fields, "accept-encoding"))
    append_line(header_lines_, "Accept-Encoding: identity");
  if (!request.range.empty()) append_line(header_lines_, "Range: bytes=" + request.range);
  for (const std::string& line : request.header_lines) append_line(header_lines_, line);
  for (const auto& [name, value] : fields) {
    // libcurl drops "Name:" and sends an empty value only for "Name;".
    std::string line = name;
    line += value.empty() ? ";" : ": ";
    append_line(header_lines_, line += value);
  }
}

void HttpExchange::configure_upload(ConstBuffer body) {
  CURL* easy = this->easy();
  upload_ = body;
  append_line(header_lines_, "Expect:");  // its answer would cost one round trip per part
  curl_easy_setopt(easy, CURLOPT_UPLOAD, 1L);
  curl_easy_setopt(easy, CURLOPT_UPLOAD_BUFFERSIZE, kSendBufferNbytes);
  curl_easy_setopt(easy, CURLOPT_INFILESIZE_LARGE, static_cast<curl_off_t>(body.size()));
  curl_easy_setopt(easy, CURLOPT_READFUNCTION, &HttpExchange::on_send);
  curl_easy_setopt(easy, CURLOPT_READDATA, this);
  curl_easy_setopt(easy, CURLOPT_SEEKFUNCTION, &HttpExchange::on_seek);
  curl_easy_setopt(easy, CURLOPT_SEEKDATA, this);
}

size_t HttpExchange::on_send(char* data, size_t size, size_t count, void* self) noexcept {
  auto& exchange = *static_cast<HttpExchange*>(self);
  const size_t nbytes = std::min(size * count, exchange.upload_->size() - exchange.upload_at_);
  std::copy_n(exchange.upload_->data() + exchange.upload_at_, nbytes,
              reinterpret_cast<std::byte*>(data));
  exchange.upload_at_ += nbytes;
  exchange.counters_.bytes.fetch_add(nbytes, std::memory_order_relaxed);
  return nbytes;
}

// libcurl goes back where it has to send again.
int HttpExchange::on_seek(void* self, curl_off_t offset, int origin) noexcept {
  auto& exchange = *static_cast<HttpExchange*>(self);
  const uint64_t at = static_cast<uint64_t>(offset);
  if (origin != SEEK_SET || offset < 0 || at > exchange.upload_->size())
    return CURL_SEEKFUNC_CANTSEEK;
  exchange.upload_at_ = static_cast<size_t>(at);
  return CURL_SEEKFUNC_OK;
}

// What libcurl calls with a header line, or bytes of the body.
template <auto kTake>
size_t HttpExchange::on_data(char* data, size_t size, size_t count, void* self) noexcept {
  auto& exchange = *static_cast<HttpExchange*>(self);
  try {
    return (exchange.*kTake)({data, size * count});
  } catch (...) {
    exchange.failure_ = std::current_exception();
    return 0;
  }
}

size_t HttpExchange::take_header_line(std::string_view line) {
  headers_nbytes_ += line.size();
  if (headers_nbytes_ > kMaxHeadersNbytes)
    throw HttpFailure{Errc::io,
                      headers_complete_
                          ? "head and trailers of the response are larger than 256 KiB"
                          : "the head of the response is larger than 256 KiB",
                      "", response_.status};
  if (headers_complete_) return line.size();  // trailers of a chunked body
  if (const auto status = parse_status_line(line)) {
    // After a 1xx, further headers follow. Words behind the status may quote what was sent.
    const size_t told = sends_password_ ? line.find(' ') + 4 : line.npos;
    response_ = HttpResponse{
        *status, printable(without_secrets(std::string(line.substr(0, told)), secrets_)), {}};
  } else if (auto field = parse_header_line(line)) {
    response_.headers.push_back(std::move(*field));
  } else if ((line == "\r\n" || line == "\n") && response_.status >= 200) {
    headers_are_complete();
  }
  return line.size();
}

void HttpExchange::note_connection() noexcept {
  if (std::exchange(counted_, true)) return;
  long opened = 0;
  curl_easy_getinfo(easy(), CURLINFO_NUM_CONNECTS, &opened);
  counters_.connections.fetch_add(static_cast<uint64_t>(opened), std::memory_order_relaxed);
}

void HttpExchange::headers_are_complete() {
  headers_complete_ = true;
  counters_.answered.store(true, std::memory_order_relaxed);
  note_connection();
  const int status = response_.status;
  // A 416 may be the answer of an empty object; check_response knows. A 304 answers a condition.
  const bool is_answer = !upload_ && (status == 416 || status == 304);
  if ((status < 200 || status >= 300) && !is_answer) return;
  sink_ = accept_(response_);
  curl_off_t tcp = 0;
  curl_off_t tls = 0;
  curl_off_t first_byte = 0;
  curl_easy_getinfo(easy(), CURLINFO_CONNECT_TIME_T, &tcp);
  curl_easy_getinfo(easy(), CURLINFO_APPCONNECT_TIME_T, &tls);
  curl_easy_getinfo(easy(), CURLINFO_STARTTRANSFER_TIME_T, &first_byte);
  time_to_connect_ = std::chrono::microseconds(std::max(tcp, tls));
  time_to_first_byte_ = std::chrono::microseconds(first_byte);
  if (gives_up_stalled_body_) {
    // For libcurl the time in which nothing came has begun with the request.
    const auto waited = std::chrono::ceil<std::chrono::milliseconds>(time_to_first_byte_);
    curl_easy_setopt(
        easy(), CURLOPT_LOW_SPEED_TIME,
        std::min(whole_seconds(kBodyStall + waited), whole_seconds(options_.stall_timeout)));
  }
  MutexLock lock(mutex_);
  accepted_ = true;
  changed_.notify_all();
}

size_t HttpExchange::take_body(std::string_view text) {
  const auto bytes = std::as_bytes(std::span(text));
  if (sink_ == nullptr) {
    const size_t room = kKeptErrorNbytes - error_body_.size();
    error_body_ += text.substr(0, room);
    error_body_nbytes_ += bytes.size();
    return error_body_nbytes_ > kMaxErrorNbytes ? 0 : bytes.size();
  }
  if (!sink_->ready()) {
    pause();
    return CURL_WRITEFUNC_PAUSE;
  }
  sink_->put(bytes);
  received_ += bytes.size();
  counters_.bytes.fetch_add(bytes.size(), std::memory_order_relaxed);
  if (received_ - told_ >= kTellNbytes || sink_->has_enough()) {
    told_ = received_;
    tell();
  }
  return bytes.size();
}

void HttpExchange::tell() noexcept {
  MutexLock lock(mutex_);
  news_ = true;
  if (listens_) changed_.notify_all();
}

void HttpExchange::ended(CURLcode code) noexcept {
  note_connection();
  MutexLock lock(mutex_);
  end_ = code;
  changed_.notify_all();
}

void HttpExchange::resume() {
  MutexLock lock(mutex_);
  if (!end_) reactor_.resume(*this);
}

bool HttpExchange::wait_for_response(const std::stop_token& stop) {
  std::optional<CURLcode> end;
  {
    MutexLock lock(mutex_);
    const auto is_over = [this]() REQUIRES_LOCK(mutex_) { return accepted_ || end_; };
    if (!changed_.wait(mutex_, stop, is_over)) throw Error(Errc::cancelled, "cancelled");
    // A failure behind the headers is for the thread that waits for the body, and counts its bytes.
    if (accepted_) return true;
    end = end_;
  }
  finish(*end);
  return false;
}

bool HttpExchange::wait_for_body(const std::stop_token& stop, const std::function<bool()>& enough,
                                 const std::function<void()>& on_idle) {
  for (;;) {
    std::optional<CURLcode> end;
    {
      MutexLock lock(mutex_);
      listens_ = enough || on_idle;
      const auto is_over = [this]() REQUIRES_LOCK(mutex_) { return (listens_ && news_) || end_; };
      changed_.wait_until(mutex_, stop, std::chrono::steady_clock::now() + kTellAfter, is_over);
      throw_if_stopped(stop);
      news_ = false;
      end = end_;
    }
    if (end) {
      finish(*end);
      return true;
    }
    if (enough && enough()) return false;
    if (on_idle) on_idle();
  }
}

void HttpExchange::finish(CURLcode code) const {
  if (failure_) std::rethrow_exception(failure_);
  // An error's body that breaks off, or is too long to read on, does not change what the error is.
  if (headers_complete_ && sink_ == nullptr) {
    if (is_redirect(response_)) return;
    throw failure_of_status(response_, error_body_);
  }
  if (code != CURLE_OK) fail(code);
  if (sink_ == nullptr)
    throw HttpFailure{.reason = "the response ended within its head",
                      .hint = "the connection broke",
                      .status = response_.status,
                      .transient = true};
}

void HttpExchange::fail(CURLcode code) const {
  std::string text = without_secrets(curl_error_text(error_text_, code), secrets_);
  // Of a proxy that it cannot use libcurl quotes all, password included.
  const bool is_bad_proxy = text.starts_with("Unsupported proxy");
  if (is_bad_proxy) text = text.substr(0, text.find('\'')) + "<redacted>";
  HttpFailure failure =
      failure_of_curl(code, printable(text, 300), curl_system_errno(easy(), code));
  if (is_bad_proxy) {
    failure.transient = false;
    failure.hint = "check proxy, http_proxy, https_proxy and all_proxy";
  }
  if (code == CURLE_OPERATION_TIMEDOUT && text.starts_with("Operation too slow")) {
    const bool heard = received_ + headers_nbytes_ + error_body_nbytes_ > 0;
    failure.reason = "the transfer stalled: " + text;
    failure.hint = "";
    failure.reached = heard;
    failure.silent = !heard;
    failure.stalled_body = sink_ != nullptr && gives_up_stalled_body_;
  }
  if (headers_complete_ && code == CURLE_PARTIAL_FILE)
    failure.reason =
        "the body ended after " + std::to_string(received_) + " bytes: " + failure.reason;
  // On a connection that was used before, this may be what an earlier response left behind.
  const bool is_garbage = code == CURLE_UNSUPPORTED_PROTOCOL || code == CURLE_WEIRD_SERVER_REPLY;
  long opened = 0;
  curl_easy_getinfo(easy(), CURLINFO_NUM_CONNECTS, &opened);
  if (is_garbage && opened == 0) failure.transient = true;
  long proxy_status = 0;
  curl_easy_getinfo(easy(), CURLINFO_HTTP_CONNECTCODE, &proxy_status);
  if (proxy_status >= 300 && response_.status == 0) {
    failure.transient = is_passing(static_cast<int>(proxy_status));
    failure.reached = true;
    failure.hint = proxy_status == 407 ? "the proxy wants credentials"
                                       : "the proxy does not connect to this host";
  }
  failure.status = response_.status;
  throw failure;
}

}  // namespace tensorizer::io
