// URLs taken apart: what is requested, what may be shown, and to whom credentials belong. Immutable
// values.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace tensorizer::io {

class HttpUrl {
 public:
  // Throws Errc::io for anything but a well-formed http or https URL; the message does not quote
  // it.
  static HttpUrl parse(const std::string& text);

  // The URL that a Location header of a response from here means. Credentials inside it are
  // dropped; those of this URL are kept where the origin stays the same. nullopt where it is no
  // http(s) URL, or leaves https for http.
  std::optional<HttpUrl> resolve(const std::string& location) const;

  // For requests: without credentials and fragment, with its query.
  const std::string& text() const noexcept { return text_; }
  // For messages: scheme, host, port if unusual, path.
  const std::string& shown() const noexcept { return shown_; }
  // Scheme, host and port: credentials go nowhere else.
  const std::string& origin() const noexcept { return origin_; }
  const std::string& query() const noexcept { return query_; }
  // Of an IPv6 address without brackets; empty where the address has a zone.
  const std::string& host() const noexcept { return host_; }
  uint16_t port() const noexcept { return port_; }
  // As it stands in the first line of a request.
  const std::string& path_and_query() const noexcept { return path_and_query_; }
  bool has_credentials() const noexcept { return has_credentials_; }
  const std::string& user() const noexcept { return user_; }
  const std::string& password() const noexcept { return password_; }
  bool is_https() const noexcept { return origin_.starts_with("https:"); }

 private:
  std::string text_;
  std::string shown_;
  std::string origin_;
  std::string query_;
  std::string host_;
  uint16_t port_ = 0;
  std::string path_and_query_;
  std::string user_;
  std::string password_;
  bool has_credentials_ = false;
};

}  // namespace tensorizer::io
