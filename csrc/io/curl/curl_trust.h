// Which certificates a TLS connection trusts, and what connections of a process share: name
// look-ups and TLS sessions.
#pragma once

#include <curl/curl.h>

#include <chrono>
#include <optional>
#include <string>
#include <utility>

namespace tensorizer::io {

struct CurlTrust {
  // Trust anchors, PEM; both empty: libcurl's default.
  std::string ca_file;
  std::string ca_path;
  bool verify_peer = true;  // and that it is the host
};

// File and folder of the trust anchors that this libcurl was built with, each empty for none;
// nullopt where its release cannot say.
std::optional<std::pair<std::string, std::string>> built_in_anchors();

// What every connection has: no signals, http(s) alone, keep-alive, shuffled addresses.
void apply_common_options(CURL* easy, std::chrono::milliseconds connect_timeout);

// Trust, and the share of this process that belongs to it. REQUIRES: `easy` is in no multi handle.
void apply_trust(CURL* easy, const CurlTrust& trust);

}  // namespace tensorizer::io
