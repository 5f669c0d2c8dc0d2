#include "io/curl/curl_verdict.h"

#include <algorithm>
#include <array>
#include <string_view>

namespace tensorizer::io {
namespace {

// CURLE_SSL_CONNECT_ERROR stands for a handshake that broke off and for two sides that do not fit;
// only the words of the TLS library (OpenSSL, GnuTLS and others) tell.
bool handshake_broke_off(const std::string& text) {
  constexpr std::array<std::string_view, 7> kWords = {
      "reset",      "SYSCALL",     "unexpected eof", "unexpected EOF",
      "terminated", "Broken pipe", "timed out"};
  return std::any_of(kWords.begin(), kWords.end(),
                     [&](std::string_view word) { return text.find(word) != std::string::npos; });
}

}  // namespace

CurlVerdict curl_verdict(CURLcode code, const std::string& text) {
  CurlVerdict verdict{"curl error " + std::to_string(static_cast<int>(code))};
  switch (code) {
    case CURLE_OUT_OF_MEMORY:  // also what libcurl says of a header line beyond its bounds
      verdict.hint = "the head of the response may be too large";
      break;
    case CURLE_COULDNT_RESOLVE_PROXY:
    case CURLE_COULDNT_RESOLVE_HOST:
      verdict.transient = true;
      verdict.hint = "check the host name and the name server";
      break;
    case CURLE_COULDNT_CONNECT:
      verdict.transient = true;
      verdict.hint = "check that the server runs and can be reached";
      break;
    case CURLE_OPERATION_TIMEDOUT:
      verdict.transient = true;
      verdict.hint = "the server may be unreachable; the connect timeout can be raised";
      break;
    case CURLE_PARTIAL_FILE:
    case CURLE_GOT_NOTHING:
    case CURLE_SEND_ERROR:
    case CURLE_RECV_ERROR:
    case CURLE_HTTP2:
    case CURLE_HTTP2_STREAM:
      verdict.transient = true;
      verdict.hint = "the connection broke";
      break;
    case CURLE_SSL_CONNECT_ERROR:
      verdict.transient = handshake_broke_off(text);
      verdict.hint = "check that the server speaks TLS on this port";
      break;
    case CURLE_PEER_FAILED_VERIFICATION:
      verdict.name = "cURL exit code 60";
      verdict.hint =
          "the server's certificate is not trusted: pass CAInfo(cacert=...) or set CURL_CA_BUNDLE";
      break;
    case CURLE_SSL_CACERT_BADFILE:
      verdict.hint = "the file or folder of trusted certificates cannot be read";
      break;
    case CURLE_UNSUPPORTED_PROTOCOL:
    case CURLE_WEIRD_SERVER_REPLY:
      verdict.hint = "the server does not speak HTTP";
      break;
    default:
      break;
  }
  return verdict;
}

}  // namespace tensorizer::io
