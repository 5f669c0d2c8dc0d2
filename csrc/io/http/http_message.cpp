#include "io/http/http_message.h"

#include <curl/curl.h>

#include <algorithm>
#include <charconv>

namespace tensorizer::io {
namespace {

char lower(char c) noexcept { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; }

bool is_space(char c) noexcept { return c == ' ' || c == '\t' || c == '\r' || c == '\n'; }

std::string_view trimmed(std::string_view text) noexcept {
  while (!text.empty() && is_space(text.front())) text.remove_prefix(1);
  while (!text.empty() && is_space(text.back())) text.remove_suffix(1);
  return text;
}

}  // namespace

bool equals_ignoring_case(std::string_view a, std::string_view b) noexcept {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](char x, char y) { return lower(x) == lower(y); });
}

std::optional<std::string_view> HttpHeaders::find(std::string_view name) const noexcept {
  for (const Field& field : fields_)
    if (equals_ignoring_case(field.first, name)) return field.second;
  return std::nullopt;
}

bool ResourceIdentity::has_strong_etag() const noexcept {
  return etag && etag->size() >= 2 && etag->front() == '"' && etag->back() == '"';
}

bool ResourceIdentity::proves_content() const noexcept {
  return has_strong_etag() || (last_modified && size);
}

std::optional<uint64_t> parse_decimal(std::string_view text) noexcept {
  uint64_t value = 0;
  const char* begin = text.data();
  const char* end = begin + text.size();
  const auto [stop, error] = std::from_chars(begin, end, value);
  if (text.empty() || error != std::errc() || stop != end) return std::nullopt;
  return value;
}

std::optional<ContentRange> parse_content_range(std::string_view text) noexcept {
  text = trimmed(text);
  constexpr std::string_view kUnit = "bytes";
  if (text.size() <= kUnit.size() || !equals_ignoring_case(text.substr(0, kUnit.size()), kUnit))
    return std::nullopt;
  text = trimmed(text.substr(kUnit.size()));
  const size_t slash = text.find('/');
  if (slash == std::string_view::npos) return std::nullopt;
  const std::string_view range = trimmed(text.substr(0, slash));
  const std::string_view total = trimmed(text.substr(slash + 1));
  ContentRange result;
  if (total != "*") {
    result.total = parse_decimal(total);
    if (!result.total) return std::nullopt;
  }
  if (range == "*") {
    result.satisfied = false;
    return result;
  }
  const size_t dash = range.find('-');
  if (dash == std::string_view::npos) return std::nullopt;
  const auto first = parse_decimal(range.substr(0, dash));
  const auto last = parse_decimal(range.substr(dash + 1));
  if (!first || !last || *first > *last || (result.total && *last >= *result.total))
    return std::nullopt;
  result.first = *first;
  result.last = *last;
  return result;
}

std::optional<std::chrono::milliseconds> parse_retry_after(std::string_view text, std::time_t now) {
  text = trimmed(text);
  constexpr uint64_t kDay = 86'400;  // beyond it the exact number matters no more
  const bool is_number = !text.empty() && text.find_first_not_of("0123456789") == text.npos;
  if (is_number)  // one that is too large for us is a long time, too
    return std::chrono::seconds(std::min<uint64_t>(parse_decimal(text).value_or(kDay), kDay));
  const std::time_t date = curl_getdate(std::string(text).c_str(), nullptr);
  if (date < 0) return std::nullopt;
  const std::time_t wait = std::clamp<std::time_t>(date - now, 0, kDay);
  return std::chrono::seconds(wait);
}

ResourceIdentity identity_of(const ResponseHead& head, std::optional<uint64_t> size) {
  ResourceIdentity identity;
  if (const auto etag = head.headers.find("etag")) identity.etag = std::string(*etag);
  if (const auto date = head.headers.find("last-modified"))
    identity.last_modified = std::string(*date);
  identity.size = size;
  return identity;
}

std::optional<HttpHeaders::Field> parse_header_line(std::string_view line) {
  const size_t colon = line.find(':');
  if (colon == std::string_view::npos || colon == 0) return std::nullopt;
  return HttpHeaders::Field(trimmed(line.substr(0, colon)), trimmed(line.substr(colon + 1)));
}

std::optional<int> parse_status_line(std::string_view line) noexcept {
  if (!line.starts_with("HTTP/")) return std::nullopt;
  const size_t space = line.find(' ');
  if (space == std::string_view::npos || line.size() < space + 4) return std::nullopt;
  const auto status = parse_decimal(line.substr(space + 1, 3));
  if (!status || *status < 100) return std::nullopt;
  return static_cast<int>(*status);
}

std::string printable(std::string_view text, size_t max_nbytes) {
  text = trimmed(text);
  const bool cut = text.size() > max_nbytes;
  std::string result(text.substr(0, max_nbytes));
  for (char& c : result)
    if (static_cast<unsigned char>(c) < 0x20 || static_cast<unsigned char>(c) >= 0x7f) c = '?';
  if (cut) result += "...";
  return result;
}

}  // namespace tensorizer::io
