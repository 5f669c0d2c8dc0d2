#include "io/http/http_message.h"

#include <curl/curl.h>

#include <algorithm>
#include <charconv>
#include <ctime>

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

std::string lower_case(std::string text) noexcept {
  for (char& c : text) c = lower(c);
  return text;
}

std::optional<std::string_view> find_field(const HttpHeaderList& fields,
                                           std::string_view name) noexcept {
  for (const HttpField& field : fields)
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

std::string range_text(uint64_t first, uint64_t nbytes) {
  return std::to_string(first) + "-" + std::to_string(first + nbytes - 1);
}

ResourceIdentity identity_of(const HttpResponse& response, std::optional<uint64_t> size) {
  ResourceIdentity identity;
  if (const auto etag = find_field(response.headers, "etag")) identity.etag = std::string(*etag);
  if (const auto date = find_field(response.headers, "last-modified"))
    identity.last_modified = std::string(*date);
  identity.size = size;
  return identity;
}

std::optional<HttpField> parse_header_line(std::string_view line) {
  const size_t colon = line.find(':');
  if (colon == std::string_view::npos || colon == 0) return std::nullopt;
  return HttpField(trimmed(line.substr(0, colon)), trimmed(line.substr(colon + 1)));
}

std::optional<int> parse_status_line(std::string_view line) noexcept {
  if (!line.starts_with("HTTP/")) return std::nullopt;
  const size_t space = line.find(' ');
  if (space == std::string_view::npos || line.size() < space + 4) return std::nullopt;
  const auto status = parse_decimal(line.substr(space + 1, 3));
  if (!status || *status < 100) return std::nullopt;
  return static_cast<int>(*status);
}

void refuse(const HttpResponse& response, const std::string& reason, const std::string& hint) {
  throw HttpFailure{Errc::io, reason + " (" + response.status_line + ")", hint, response.status};
}

namespace {

[[noreturn]] void refuse_changed(const HttpResponse& response, const char* what) {
  refuse(response, std::string("the object changed while it was read: ") + what,
         "load it again once writing has ended");
}

std::optional<uint64_t> content_length(const HttpResponse& response) {
  const auto text = find_field(response.headers, "content-length");
  // With a transfer coding the length is not the body's.
  if (!text || find_field(response.headers, "transfer-encoding")) return std::nullopt;
  const auto length = parse_decimal(*text);
  if (!length) refuse(response, "Content-Length is no number: '" + printable(*text, 60) + "'");
  return length;
}

// Lengths and ranges do not count the bytes of a body that the server packed, and it may unpack to
// any size; no request asks for one.
void check_transfer_coding(const HttpResponse& response) {
  for (const auto& [name, value] : response.headers) {
    if (!equals_ignoring_case(name, "transfer-encoding")) continue;
    // "identity" is RFC 2616's word for no coding.
    if (!equals_ignoring_case(value, "chunked") && !equals_ignoring_case(value, "identity"))
      refuse(response,
             "expected a body as it is, got Transfer-Encoding '" + printable(value, 60) + "'",
             "the server breaks the HTTP standard");
  }
}

void check_identity(const HttpResponse& response, const ResourceIdentity& known,
                    const ResourceIdentity& found) {
  if (known.size && found.size && *known.size != *found.size) {
    const std::string sizes =
        std::to_string(*known.size) + " bytes at open, now " + std::to_string(*found.size);
    refuse_changed(response, sizes.c_str());
  }
  // A server that no longer says what the object was recognised by may send another object.
  if (known.etag) {
    if (!found.etag) refuse_changed(response, "it had an ETag, and now has none");
    if (*known.etag != *found.etag) refuse_changed(response, "its ETag is another one");
  } else if (known.last_modified) {
    if (!found.last_modified) refuse_changed(response, "it had a Last-Modified, and now has none");
    if (*known.last_modified != *found.last_modified)
      refuse_changed(response, "its Last-Modified is another one");
  }
}

CheckedResponse check_partial(const RangeRequest& request, const HttpResponse& response) {
  const uint64_t wanted_last = request.first + request.nbytes - 1;
  const std::string wanted = "expected bytes " + range_text(request.first, request.nbytes);
  const auto text = find_field(response.headers, "content-range");
  if (!text)
    refuse(response, wanted + ", got no Content-Range", "the server breaks the HTTP standard");
  const auto range = parse_content_range(*text);
  const std::string found = ", got Content-Range '" + printable(*text, 80) + "'";
  if (!range || !range->satisfied) refuse(response, wanted + found);
  uint64_t expected_last = wanted_last;
  if (range->total) expected_last = std::min(expected_last, *range->total - 1);
  // Without a total, a shorter answer may be the end of the object: the next request will tell.
  const bool last_fits = range->total ? range->last == expected_last : range->last <= expected_last;
  if (range->first != request.first || !last_fits) refuse(response, wanted + found);
  CheckedResponse result;
  result.body_nbytes = range->last - range->first + 1;
  const auto length = content_length(response);
  if (length && *length != *result.body_nbytes)
    refuse(response, wanted + found + " but Content-Length " + std::to_string(*length));
  result.identity = identity_of(response, range->total);
  return result;
}

CheckedResponse check_whole(const HttpResponse& response) {
  CheckedResponse result;
  result.partial = false;
  result.body_nbytes = content_length(response);
  result.identity = identity_of(response, result.body_nbytes);
  return result;
}

// S3 servers name the reason in XML; everything else in such a body may hold signatures.
std::string s3_error_code(std::string_view body) {
  constexpr std::string_view kOpen = "<Code>";
  const size_t begin = body.find(kOpen);
  if (begin == std::string_view::npos) return {};
  body.remove_prefix(begin + kOpen.size());
  const size_t end = body.find("</Code>");
  if (end == std::string_view::npos || end == 0 || end > 64) return {};
  const std::string_view code = body.substr(0, end);
  const bool is_word = std::all_of(code.begin(), code.end(), [](unsigned char c) {
    return (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z');
  });
  return is_word ? std::string(code) : std::string();
}

constexpr const char* kOtherRegion =
    "the bucket is in another region or at another endpoint: set s3_region_name or s3_endpoint";
constexpr const char* kWrongKeys = "the S3 keys are wrong, or belong to another endpoint";
constexpr const char* kNoKey = "there is no such bucket or key: check URI and endpoint";
constexpr std::pair<std::string_view, const char*> kHintsOfS3[] = {
    {"RequestTimeTooSkewed", "the clock of this computer is wrong"},
    {"PermanentRedirect", kOtherRegion},
    {"AuthorizationHeaderMalformed", kOtherRegion},
    {"SignatureDoesNotMatch", kWrongKeys},
    {"InvalidAccessKeyId", kWrongKeys},
    {"NoSuchBucket", kNoKey},
    {"NoSuchKey", kNoKey}};

constexpr const char* kNoObject = "there is no such object: check host and path";
constexpr std::pair<int, const char*> kHintsOfStatus[] = {
    {401, "the server wants credentials: pass an Authorization header, or credentials in the URL"},
    {403, "access was denied: check the permissions; a presigned URL may have expired"},
    {404, kNoObject},
    {407, "the proxy wants credentials"},
    {410, kNoObject},
    {412, "the object changed since it was opened: load it again"},
    {416, "the range lies outside of the object"},
    {429, "the server limits requests: use fewer connections"}};

template <class Hints, class Key>
const char* hint_in(const Hints& hints, const Key& key) {
  const auto found = std::ranges::find(hints, key, [](const auto& hint) { return hint.first; });
  return found == std::end(hints) ? "" : found->second;
}

}  // namespace

bool is_passing(int status) noexcept {
  // Not implemented and version not supported will not change by waiting.
  if (status == 501 || status == 505) return false;
  return status == 408 || status == 429 || status >= 500;
}

bool is_redirect(const HttpResponse& response) noexcept {
  const int status = response.status;
  return (status == 301 || status == 302 || status == 303 || status == 307 || status == 308) &&
         find_field(response.headers, "location");
}

HttpFailure failure_of_status(const HttpResponse& response, std::string_view body) {
  HttpFailure failure;
  failure.status = response.status;
  failure.reason = response.status_line;
  const std::string code = s3_error_code(body);
  if (!code.empty()) failure.reason += " [" + code + "]";
  failure.hint = hint_in(kHintsOfS3, code);
  if (failure.hint.empty()) failure.hint = hint_in(kHintsOfStatus, response.status);
  if (failure.hint.empty() && response.status / 100 == 3 && response.status != 304)
    failure.hint = "a redirect without a target that can be followed";
  if (response.status == 404 || response.status == 410) failure.code = Errc::not_found;
  // S3 says so, with status 400, of an upload whose bytes came too slowly, or not as they were
  // sent.
  failure.transient =
      is_passing(response.status) || code == "RequestTimeout" || code == "BadDigest";
  if (const auto after = find_field(response.headers, "retry-after"))
    failure.retry_after = parse_retry_after(*after, std::time(nullptr));
  return failure;
}

CheckedResponse check_response(const RangeRequest& request, const HttpResponse& response) {
  CheckedResponse result;
  if (response.status == 206 || response.status == 200) check_transfer_coding(response);
  if (response.status == 206) {
    if (request.ranges_refused)
      refuse(response, "a server without ranges answered with one",
             "it may be several servers: load again");
    result = check_partial(request, response);
  } else if (response.status == 200) {
    if (request.known != nullptr && !request.ranges_refused)
      refuse(response, "expected status 206 for a range, got the whole object",
             "the server has stopped to answer ranges, or the object changed");
    result = check_whole(response);
  } else if (response.status == 416 && request.known == nullptr && request.first == 0) {
    const auto text = find_field(response.headers, "content-range");
    const auto range = text ? parse_content_range(*text) : std::nullopt;
    if (!range || range->satisfied || range->total != 0) throw failure_of_status(response, {});
    result.body_nbytes = 0;
    result.identity = identity_of(response, 0);
  } else if (response.status >= 200 && response.status < 300) {
    refuse(response, "expected status 206 or 200", "the server gave no content");
  } else {
    throw failure_of_status(response, {});
  }
  if (request.known != nullptr) check_identity(response, *request.known, result.identity);
  return result;
}

std::optional<std::string> condition_header(const ResourceIdentity& known) {
  if (known.has_strong_etag()) return "If-Match: " + *known.etag;
  if (known.last_modified) return "If-Unmodified-Since: " + *known.last_modified;
  return std::nullopt;
}

Error to_error(const HttpFailure& failure, const std::string& operation, const std::string& name,
               int tries, std::optional<uint64_t> offset) {
  std::string text = operation + " " + name + ": " + failure.reason;
  if (tries > 1) text += " (after " + std::to_string(tries) + " tries)";
  if (!failure.hint.empty()) text += "; " + failure.hint;
  Error error(failure.code, text, name, offset);
  error.http_status = failure.status;
  return error;
}

}  // namespace tensorizer::io
