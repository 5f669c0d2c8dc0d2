// URLs taken apart: what is requested, what may be shown, and which host gets credentials.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace tensorizer::io {

struct HttpUrl {
  // Throws Errc::io for anything but a well-formed http or https URL; the message does not quote
  // it. Segments "." and ".." of the path are resolved, as in browsers, unless `path_as_is`: a URL
  // that a function made may be signed with them.
  static HttpUrl parse(const std::string& text, bool path_as_is = false);

  // The URL that a Location header of a response from here means. Credentials inside it are
  // dropped; those of this URL are kept where the origin stays the same. nullopt where it is no
  // http(s) URL, or leaves https for http.
  std::optional<HttpUrl> resolve(const std::string& location) const;

  bool has_credentials() const noexcept { return !user.empty() || !password.empty(); }
  bool is_https() const noexcept { return origin.starts_with("https:"); }

  std::string text;   // for requests: without credentials and fragment, with its query
  std::string shown;  // for messages: scheme, host, port if unusual, path
  // Scheme, host and port, in lower case: credentials go nowhere else.
  std::string origin;
  std::string query;
  std::string host;  // of an IPv6 address without brackets; empty where the address has a zone
  uint16_t port = 0;
  std::string path_and_query;  // as it stands in the first line of a request
  std::string user, password;
};

}  // namespace tensorizer::io
