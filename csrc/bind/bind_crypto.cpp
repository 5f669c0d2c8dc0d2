// Keys as Python sees them: opaque objects that show nothing; derivation without the lock; the
// choice of kernel.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <sodium.h>

#include <memory>
#include <optional>
#include <string>

#include "bind/bindings.h"
#include "bind/gil.h"
#include "core/error.h"
#include "crypto/chunked_box.h"
#include "crypto/key_derivation.h"
#include "crypto/secret_key.h"

namespace tensorizer::bind {
namespace {

using crypto::SecretKey;
using SharedKey =
    std::shared_ptr<SecretKey>;  // several sessions may use one key and end in any order

SharedKey make_key(const py::object& bytes) {
  return std::make_shared<SecretKey>(BytesView(bytes).bytes());
}

SharedKey derive(const py::bytes& passphrase, uint64_t opslimit, uint64_t memlimit,
                 int32_t algorithm, const py::bytes& salt, std::optional<uint64_t> max_opslimit,
                 std::optional<uint64_t> max_memlimit) {
  const crypto::DerivationParams params{opslimit, memlimit, algorithm, bytes_of(salt)};
  const crypto::DerivationLimits limits{
      max_opslimit.value_or(crypto::kNoDerivationLimits.max_opslimit),
      max_memlimit.value_or(crypto::kNoDerivationLimits.max_memlimit),
      crypto::kNoDerivationLimits.max_derivations};
  const auto secret = bytes_of(passphrase);
  return std::make_shared<SecretKey>(run_interruptible(
      [&](const std::stop_token&) { return crypto::derive_key(secret, params, limits); }));
}

bool sodium_available() {
  try {
    crypto::require_sodium();
    return true;
  } catch (const Error&) {
    return false;
  }
}

std::pair<py::bytes, py::bytes> seal(const py::object& plain, const py::object& nonce,
                                     const SharedKey& key) {
  const BytesView plain_view(plain), nonce_view(nonce);
  const auto nonce_bytes = exactly<kNonceNbytes>(nonce_view.bytes(), "nonce");
  py::bytes cipher = new_bytes(plain_view.bytes().size()), mac = new_bytes(kMacNbytes);
  crypto::seal(contents(cipher), contents(mac).first<kMacNbytes>(), plain_view.bytes(), nonce_bytes,
               *key);
  return {cipher, mac};
}

std::optional<py::bytes> open(const py::object& cipher, const py::object& mac,
                              const py::object& nonce, const SharedKey& key) {
  const BytesView cipher_view(cipher), mac_view(mac), nonce_view(nonce);
  const auto mac_bytes = exactly<kMacNbytes>(mac_view.bytes(), "MAC");
  const auto nonce_bytes = exactly<kNonceNbytes>(nonce_view.bytes(), "nonce");
  py::bytes plain = new_bytes(cipher_view.bytes().size());
  if (!crypto::open(contents(plain), cipher_view.bytes(), mac_bytes, nonce_bytes, *key)) return {};
  return plain;
}

py::bytes nonce_plus(const py::object& nonce, uint64_t n) {
  const BytesView view(nonce);
  return to_bytes(crypto::nonce_plus(exactly<kNonceNbytes>(view.bytes(), "nonce"), n));
}

// The presets of the libsodium that is loaded, to be compared with the enums of
// tensorizer/encryption.py.
py::dict presets() {
  py::dict result;
  result["OpsLimit"] = py::dict(py::arg("MIN") = crypto_pwhash_opslimit_min(),
                                py::arg("INTERACTIVE") = crypto_pwhash_opslimit_interactive(),
                                py::arg("MODERATE") = crypto_pwhash_opslimit_moderate(),
                                py::arg("SENSITIVE") = crypto_pwhash_opslimit_sensitive());
  result["MemLimit"] = py::dict(py::arg("MIN") = crypto_pwhash_memlimit_min(),
                                py::arg("INTERACTIVE") = crypto_pwhash_memlimit_interactive(),
                                py::arg("MODERATE") = crypto_pwhash_memlimit_moderate(),
                                py::arg("SENSITIVE") = crypto_pwhash_memlimit_sensitive());
  return result;
}

}  // namespace

void register_crypto(py::module_& m) {
  py::class_<SecretKey, SharedKey>(m, "SecretKey", "32 secret bytes in guarded memory.")
      .def(py::init(&make_key), py::arg("key"))
      .def(
          "export", [](const SecretKey& key) { return to_bytes(key.bytes()); },
          "A copy of the key as bytes, which Python cannot wipe.")
      .def("__repr__", [](const SecretKey&) { return "<SecretKey>"; });
  m.def("random_key", [] { return std::make_shared<SecretKey>(SecretKey::random()); });
  m.def("derive_key", &derive, py::arg("passphrase"), py::arg("opslimit"), py::arg("memlimit"),
        py::arg("algorithm"), py::arg("salt"), py::kw_only(), py::arg("max_opslimit") = py::none(),
        py::arg("max_memlimit") = py::none());
  m.def("same_secret", [](const SecretKey& a, const SecretKey& b) {
    return crypto::same_secret(a.bytes(), b.bytes());
  });
  m.def("same_secret", [](const py::bytes& a, const py::bytes& b) {
    return crypto::same_secret(bytes_of(a), bytes_of(b));
  });
  m.def("random_bytes", [](size_t nbytes) {
    py::bytes result = new_bytes(nbytes);
    crypto::random_bytes(contents(result));
    return result;
  });
  m.def("sodium_available", &sodium_available);
  m.def("available_kernels", &crypto::available_kernels);
  m.def("active_kernel", &crypto::active_kernel);
  m.def("select_kernel", &crypto::select_kernel, py::arg("name"));
  m.attr("DEFAULT_MAX_OPSLIMIT") = crypto::DerivationLimits{}.max_opslimit;
  m.attr("DEFAULT_MAX_MEMLIMIT") = crypto::DerivationLimits{}.max_memlimit;
  m.attr("DEFAULT_MAX_DERIVATIONS") = crypto::DerivationLimits{}.max_derivations;

  py::module_ testing = m.def_submodule("testing", "Pure functions, for the tests.");
  testing.def("seal", &seal, py::arg("plain"), py::arg("nonce"), py::arg("key"));
  testing.def("open", &open, py::arg("cipher"), py::arg("mac"), py::arg("nonce"), py::arg("key"));
  testing.def("nonce_plus", &nonce_plus, py::arg("nonce"), py::arg("n"));
  testing.def("derivation_presets", &presets);
}

}  // namespace tensorizer::bind
