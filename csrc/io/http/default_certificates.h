// Where this libcurl looks for trust anchors unless it is told otherwise.
#pragma once

#include <optional>
#include <string>

namespace tensorizer::io {

struct DefaultCertificates {
  std::string file;
  std::string folder;
};

// Nothing where this release of libcurl cannot say; empty texts where it was built to know of none.
std::optional<DefaultCertificates> default_certificates();

}  // namespace tensorizer::io
