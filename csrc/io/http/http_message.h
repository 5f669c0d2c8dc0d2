// Heads of HTTP responses, and the header values we understand. Pure.
#pragma once

#include <chrono>
#include <cstdint>
#include <ctime>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tensorizer::io {

inline constexpr size_t kMaxHeadNbytes = size_t{256} << 10;
// Of an error's body: enough for the S3 error code.
inline constexpr size_t kKeptErrorNbytes = 4096;

class HttpHeaders {
 public:
  using Field = std::pair<std::string, std::string>;

  void add(std::string name, std::string value) {
    fields_.emplace_back(std::move(name), std::move(value));
  }
  // The first field of that name, whatever its case.
  std::optional<std::string_view> find(std::string_view name) const noexcept;
  const std::vector<Field>& fields() const noexcept { return fields_; }

 private:
  std::vector<Field> fields_;
};

struct ResponseHead {
  int status = 0;
  std::string status_line;  // "HTTP/1.1 404 Not Found", printable and short
  HttpHeaders headers;
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

ResourceIdentity identity_of(const ResponseHead& head, std::optional<uint64_t> size);

// Splits "Name: value\r\n"; nullopt for anything else.
std::optional<HttpHeaders::Field> parse_header_line(std::string_view line);
// Status of "HTTP/1.1 206 Partial Content"; nullopt for anything else.
std::optional<int> parse_status_line(std::string_view line) noexcept;

// The text with everything unprintable replaced, cut to `max_nbytes`: for messages.
std::string printable(std::string_view text, size_t max_nbytes = 200);

bool equals_ignoring_case(std::string_view a, std::string_view b) noexcept;

}  // namespace tensorizer::io
