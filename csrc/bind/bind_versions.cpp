// The releases of other libraries that this module runs with: those in a wheel, or those that the
// system has.
#include <curl/curl.h>
#include <hiredis/hiredis.h>
#include <isa-l.h>
#include <openssl/crypto.h>
#include <pybind11/pybind11.h>
#include <sodium.h>

#include <string>

#include "bind/bindings.h"

namespace tensorizer::bind {
namespace {

std::string joined(int major, int minor, int patch) {
  return std::to_string(major) + '.' + std::to_string(minor) + '.' + std::to_string(patch);
}

// "OpenSSL 3.5.7 9 Jun 2026": the second word.
std::string openssl_version() {
  const std::string text = OpenSSL_version(OPENSSL_VERSION);
  const size_t start = text.find(' ') + 1;
  return text.substr(start, text.find(' ', start) - start);
}

// Those of shared libraries are asked at run time; hiredis and ISA-L can only say what they were
// when compiled with.
py::dict library_versions() {
  const curl_version_info_data* curl = curl_version_info(CURLVERSION_NOW);
  py::dict found;
  found["curl"] = curl->version;
  if (curl->age >= CURLVERSION_SIXTH && curl->nghttp2_version)
    found["nghttp2"] = curl->nghttp2_version;
  found["openssl"] = openssl_version();
  found["libsodium"] = sodium_version_string();
  found["hiredis"] = joined(HIREDIS_MAJOR, HIREDIS_MINOR, HIREDIS_PATCH);
  found["isa-l"] = joined(ISAL_MAJOR_VERSION, ISAL_MINOR_VERSION, ISAL_PATCH_VERSION);
  return found;
}

}  // namespace

void register_versions(py::module_& m) { m.def("library_versions", &library_versions); }

}  // namespace tensorizer::bind
