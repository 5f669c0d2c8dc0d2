#include "io/http/default_certificates.h"

#include <curl/curl.h>

namespace tensorizer::io {

std::optional<DefaultCertificates> default_certificates() {
#if LIBCURL_VERSION_NUM >= 0x074600
  const curl_version_info_data* info = curl_version_info(CURLVERSION_NOW);
  if (info->age >= CURLVERSION_SEVENTH)
    return DefaultCertificates{info->cainfo ? info->cainfo : "", info->capath ? info->capath : ""};
#endif
  return std::nullopt;
}

}  // namespace tensorizer::io
