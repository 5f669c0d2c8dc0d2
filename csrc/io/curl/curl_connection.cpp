#include "io/curl/curl_connection.h"

#include <sys/socket.h>

#include <cerrno>

namespace tensorizer::io {
namespace {

std::string url_of(const ConnectOptions& options) {
  const std::string scheme = options.tls ? "https://" : "http://";
  if (!options.unix_path.empty()) return scheme + "localhost/";
  const bool ipv6 = options.host.find(':') != std::string::npos;
  return scheme + (ipv6 ? "[" + options.host + "]" : options.host) + ":" +
         std::to_string(options.port) + "/";
}

int set_receive_buffer(void* nbytes, curl_socket_t socket, curlsocktype) noexcept {
  if (*static_cast<const int*>(nbytes) > 0)
    setsockopt(socket, SOL_SOCKET, SO_RCVBUF, nbytes, sizeof(int));
  return CURL_SOCKOPT_OK;
}

}  // namespace

CurlConnection::CurlConnection(CurlLane& lane, const ConnectOptions& options)
    : lane_(lane),
      url_(url_of(options)),
      receive_buffer_nbytes_(options.receive_buffer_nbytes),
      easy_(lane_.take_easy()),
      error_text_(CURL_ERROR_SIZE, '\0') {
  CURL* easy = easy_.get();
  apply_common_options(easy, options.connect_timeout);
  apply_trust(easy, options.tls ? options.trust : CurlTrust::in_clear());
  curl_easy_setopt(easy, CURLOPT_URL, url_.c_str());
  curl_easy_setopt(easy, CURLOPT_CONNECT_ONLY, 1L);
  curl_easy_setopt(easy, CURLOPT_PROXY, "");  // those of the environment are for libcurl's HTTP
  curl_easy_setopt(easy, CURLOPT_HTTP_VERSION, static_cast<long>(CURL_HTTP_VERSION_1_1));
  curl_easy_setopt(easy, CURLOPT_SSL_ENABLE_ALPN, 0L);
  curl_easy_setopt(easy, CURLOPT_SSLVERSION, static_cast<long>(CURL_SSLVERSION_TLSv1_2));
  if (!options.unix_path.empty())
    curl_easy_setopt(easy, CURLOPT_UNIX_SOCKET_PATH, options.unix_path.c_str());
  curl_easy_setopt(easy, CURLOPT_SOCKOPTFUNCTION, &set_receive_buffer);
  curl_easy_setopt(easy, CURLOPT_SOCKOPTDATA, &receive_buffer_nbytes_);
  curl_easy_setopt(easy, CURLOPT_ERRORBUFFER, error_text_.data());
  curl_easy_setopt(easy, CURLOPT_PRIVATE, reinterpret_cast<char*>(&completion_));
  lane_.add(easy);
}

CurlConnection::~CurlConnection() {
  if (lane_.belongs_to_this_process()) {
    lane_.remove(easy_.get());
  } else {
    (void)easy_.release();
  }
}

CURLcode CurlConnection::code() const noexcept {
  if (completion_.code != CURLE_OK) return completion_.code;
  return socket() == CURL_SOCKET_BAD ? CURLE_COULDNT_CONNECT : CURLE_OK;
}

std::string CurlConnection::error_text(CURLcode code) const {
  std::string text = error_text_.c_str();
  return text.empty() ? curl_easy_strerror(code) : text;
}

curl_socket_t CurlConnection::socket() const noexcept {
  curl_socket_t socket = CURL_SOCKET_BAD;
  if (completion_.done) curl_easy_getinfo(easy_.get(), CURLINFO_ACTIVESOCKET, &socket);
  return socket;
}

bool CurlConnection::leads_to(const ConnectOptions& options) const {
  return url_ == url_of(options);
}

bool CurlConnection::is_quiet() const noexcept {
  const curl_socket_t fd = socket();
  if (fd == CURL_SOCKET_BAD) return false;
  char byte = 0;
  return ::recv(fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT) < 0 &&
         (errno == EAGAIN || errno == EWOULDBLOCK);
}

}  // namespace tensorizer::io
