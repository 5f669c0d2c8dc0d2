// Judges responses: is this the answer to the request, is it the same object, is another try worth
// while. Pure.
#pragma once

#include <chrono>
#include <cstdint>
#include <exception>
#include <optional>
#include <string>

#include "core/error.h"
#include "io/http/http_message.h"

namespace tensorizer::io {

// Why one try did not give its bytes. Internal: HttpSource and http_put turn the last one into an
// Error that names operation and object. Texts hold no secret.
struct HttpFailure {
  Errc code = Errc::io;
  std::string reason;
  std::string hint = {};
  int status = 0;  // of the response, 0 where there was none
  bool transient = false;
  std::optional<std::chrono::milliseconds> retry_after = std::nullopt;
  bool reached = false;  // a server or a proxy was there, though there may be no response
  // What renewing an address threw; thrown in place of this where there is no further try.
  std::exception_ptr cause = nullptr;
};

// What was asked for, and what is known about the object.
struct RangeRequest {
  uint64_t first = 0;
  uint64_t nbytes = 0;  // 1 or more
  // The identity seen at open; nullptr for the request that opens.
  const ResourceIdentity* known = nullptr;
  // Whether the server has answered 200 to a ranged request before: it will again.
  bool ranges_refused = false;
};

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
CheckedResponse check_response(const RangeRequest& request, const ResponseHead& head);

// The failure that a response with an error status means. `body` is the beginning of its body, of
// which only an S3 error code is used.
HttpFailure failure_of_status(const ResponseHead& head, std::string_view body);

// True for statuses that may be another one later: 408, 429, and 5xx but for 501 and 505.
bool is_passing(int status) noexcept;

// True for 301, 302, 303, 307, 308.
bool is_redirect(int status) noexcept;

// Conditions under which the server may answer with bytes of the object seen at open, as header
// lines.
std::optional<std::string> condition_header(const ResourceIdentity& known);

// "Failed to read https://host/path: <reason> (after 5 tries); <hint>".
Error to_error(const HttpFailure& failure, const std::string& operation, const std::string& name,
               int tries, std::optional<uint64_t> offset);

}  // namespace tensorizer::io
