#include "io/http/http_url.h"

#include <curl/curl.h>

#include <memory>
#include <new>

#include "core/error.h"
#include "io/http/http_message.h"

namespace tensorizer::io {
namespace {

struct FreeUrl {
  void operator()(CURLU* url) const noexcept { curl_url_cleanup(url); }
};
using UniqueUrl = std::unique_ptr<CURLU, FreeUrl>;

UniqueUrl new_url() {
  UniqueUrl url(curl_url());
  if (!url) throw std::bad_alloc();
  return url;
}

// An absent part is empty.
std::string part(CURLU* url, CURLUPart which, unsigned flags = 0) {
  char* text = nullptr;
  if (curl_url_get(url, which, &text, flags) != CURLUE_OK) return {};
  std::unique_ptr<char, void (*)(void*)> owner(text, curl_free);
  return text;
}

bool is_http(CURLU* url) {
  const std::string scheme = part(url, CURLUPART_SCHEME);
  return equals_ignoring_case(scheme, "http") || equals_ignoring_case(scheme, "https");
}

}  // namespace

HttpUrl HttpUrl::parse(const std::string& text, bool path_as_is) {
  UniqueUrl url = new_url();
  // A NUL would silently cut the text for libcurl.
  const bool bad = text.find('\0') != std::string::npos ||
                   curl_url_set(url.get(), CURLUPART_URL, text.c_str(),
                                path_as_is ? CURLU_PATH_AS_IS : 0) != CURLUE_OK;
  if (bad || !is_http(url.get()))
    throw Error(Errc::io, "Failed to open stream: not a well-formed http(s) URL");
  HttpUrl result;
  result.user = part(url.get(), CURLUPART_USER, CURLU_URLDECODE);
  result.password = part(url.get(), CURLUPART_PASSWORD, CURLU_URLDECODE);
  for (const CURLUPart secret : {CURLUPART_USER, CURLUPART_PASSWORD, CURLUPART_FRAGMENT})
    curl_url_set(url.get(), secret, nullptr, 0);
  result.text = part(url.get(), CURLUPART_URL);
  result.query = part(url.get(), CURLUPART_QUERY);
  const std::string scheme = part(url.get(), CURLUPART_SCHEME);
  const std::string host = part(url.get(), CURLUPART_HOST);
  const std::string path = part(url.get(), CURLUPART_PATH);
  const std::string port = part(url.get(), CURLUPART_PORT, CURLU_DEFAULT_PORT);
  const std::string unusual_port = part(url.get(), CURLUPART_PORT, CURLU_NO_DEFAULT_PORT);
  result.origin = lower_case(scheme + "://" + host + ":" + port);
  result.shown = printable(
      scheme + "://" + host + (unusual_port.empty() ? "" : ":" + unusual_port) + path, 1000);
  const bool is_ipv6 = host.starts_with('[');
  if (part(url.get(), CURLUPART_ZONEID).empty())
    result.host = is_ipv6 ? host.substr(1, host.size() - 2) : host;
  result.port = static_cast<uint16_t>(parse_decimal(port).value_or(0));
  result.path_and_query = path + (result.query.empty() ? "" : "?" + result.query);
  return result;
}

std::optional<HttpUrl> HttpUrl::resolve(const std::string& location) const {
  UniqueUrl url = new_url();
  if (curl_url_set(url.get(), CURLUPART_URL, text.c_str(), 0) != CURLUE_OK) return std::nullopt;
  if (curl_url_set(url.get(), CURLUPART_URL, location.c_str(), CURLU_URLENCODE) != CURLUE_OK)
    return std::nullopt;
  if (!is_http(url.get())) return std::nullopt;
  for (const CURLUPart secret : {CURLUPART_USER, CURLUPART_PASSWORD})
    curl_url_set(url.get(), secret, nullptr, 0);
  HttpUrl result = parse(part(url.get(), CURLUPART_URL));
  if (is_https() && !result.is_https()) return std::nullopt;
  if (result.origin == origin) {
    result.user = user;
    result.password = password;
  }
  return result;
}

}  // namespace tensorizer::io
