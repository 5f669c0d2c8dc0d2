// Status and headers of HTTP responses: what they say, whether they answer the request, for the
// same object, and whether another try is worth while. Pure.
#pragma once

#include <chrono>
#include <cstdint>
#include <ctime>
#include <exception>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/error.h"

namespace tensorizer::io {

inline constexpr size_t kMaxHeadersNbytes = size_t{256} << 10;
// Of an error's body: enough for the S3 error code.
inline constexpr size_t kKeptErrorNbytes = 4096;

using HttpField = std::pair<std::string, std::string>;
using HttpHeaderList = std::vector<HttpField>;
// The value of the first field of that name, whatever its case.
std::optional<std::string_view> find_field(const HttpHeaderList& fields,
                                           std::string_view name) noexcept;

struct HttpResponse {
  int status = 0;
  std::string status_line;  // "HTTP/1.1 404 Not Found", printable, short, without secrets
  HttpHeaderList headers;
};

// What a resource is recognised by, taken from the response that opened it.
struct ResourceIdentity {
  std::optional<std::string> etag;  // as sent, quotes and W/ included
  std::optional<std::string> last_modified;
  std::optional<uint64_t> size;

  bool has_strong_etag() const noexcept;
  // True where two equal identities prove equal bytes: a strong ETag, or a date and a size.
  bool proves_content() const noexcept;
};

// "bytes 0-99/1000", "bytes 0-99/*", "bytes */1000" (no range).
struct ContentRange {
  bool satisfied = true;
  uint64_t first = 0;
  uint64_t last = 0;
  std::optional<uint64_t> total;
};

std::optional<uint64_t> parse_decimal(std::string_view text) noexcept;
std::optional<ContentRange> parse_content_range(std::string_view text) noexcept;
// Seconds or an HTTP date; a date in the past is zero.
std::optional<std::chrono::milliseconds> parse_retry_after(std::string_view text, std::time_t now);

ResourceIdentity identity_of(const HttpResponse& response, std::optional<uint64_t> size);

// Splits "Name: value\r\n"; nullopt for anything else.
std::optional<HttpField> parse_header_line(std::string_view line);
// Status of "HTTP/1.1 206 Partial Content"; nullopt for anything else.
std::optional<int> parse_status_line(std::string_view line) noexcept;

bool equals_ignoring_case(std::string_view a, std::string_view b) noexcept;
// Letters of ASCII alone.
std::string lower_case(std::string text) noexcept;

// Why one try did not give its bytes. Internal: HttpSource and http_put turn the last one into an
// Error that names operation and object. Texts hold no secret.
struct HttpFailure {
  Errc code = Errc::io;
  std::string reason = {};
  std::string hint = {};
  int status = 0;  // of the response, 0 where there was none
  bool transient = false;
  std::optional<std::chrono::milliseconds> retry_after = std::nullopt;
  bool reached = false;       // a server or a proxy was there, though there may be no response
  bool silent = false;        // it took the request and sent nothing for as long as a stall takes
  bool stalled_body = false;  // see HttpRequest::gives_up_stalled_body
  // What renewing an address threw; thrown in place of this where there is no further try.
  std::exception_ptr cause = nullptr;
};

inline constexpr const char* kTooManyFilesHint =
    "raise the limit of open files (ulimit -n), or use fewer connections";

// Why there is no try where `cause` was thrown instead of a fresh address.
inline HttpFailure not_renewed(std::exception_ptr cause) {
  return {.reason = "a fresh URL or fresh headers could not be had",
          .transient = true,
          .cause = std::move(cause)};
}

// What was asked for, and what is known about the object.
struct RangeRequest {
  uint64_t first = 0;
  uint64_t nbytes = 0;  // 1 or more
  // The identity seen at open; nullptr for the request that opens.
  const ResourceIdentity* known = nullptr;
  // Whether the server has answered 200 to a ranged request before: it will again.
  bool ranges_refused = false;
};

// "0-99", as requests and messages say it.
std::string range_text(uint64_t first, uint64_t nbytes);

struct CheckedResponse {
  // False for the whole resource from byte 0, in answer to a range: a server without ranges.
  bool partial = true;
  // Bytes that the body must have; nullopt where only its end tells.
  std::optional<uint64_t> body_nbytes;
  // Size, ETag and date of the object.
  ResourceIdentity identity;
};

// The one place where a 2xx (or the 416 of an empty object) is accepted. Throws HttpFailure for
// every other response and for each contradiction: Content-Range, Content-Length, size, ETag, date.
CheckedResponse check_response(const RangeRequest& request, const HttpResponse& response);

// The failure that a response with an error status means. `body` is the beginning of its body, of
// which only an S3 error code is used.
HttpFailure failure_of_status(const HttpResponse& response, std::string_view body);

// Throws the HttpFailure of a response that cannot be used; `reason` comes with its status line.
[[noreturn]] void refuse(const HttpResponse& response, const std::string& reason,
                         const std::string& hint = {});

// True for statuses that may be another one later: 408, 429, and 5xx but for 501 and 505.
bool is_passing(int status) noexcept;

// True for 301, 302, 303, 307, 308 that name a target.
bool is_redirect(const HttpResponse& response) noexcept;

// Conditions under which the server may answer with bytes of the object seen at open, as header
// lines.
std::optional<std::string> condition_header(const ResourceIdentity& known);

// "Failed to read https://host/path: <reason> (after 5 tries); <hint>".
Error to_error(const HttpFailure& failure, const std::string& operation, const std::string& name,
               int tries, std::optional<uint64_t> offset);

}  // namespace tensorizer::io
