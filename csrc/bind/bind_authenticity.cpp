// Signing keys, signatures, and the checks of an opened index.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <string>

#include "bind/bindings.h"
#include "bind/calling_thread.h"
#include "bind/gil.h"
#include "core/byte_cursor.h"
#include "core/byte_writer.h"
#include "core/error.h"
#include "crypto/authentication.h"
#include "crypto/key_derivation.h"
#include "sign/authenticity.h"
#include "sign/detached.h"

namespace tensorizer::bind {
namespace {

using crypto::PublicKeyBytes;
using crypto::SecretKey;
using crypto::Signer;
using load::OpenedIndex;

template <size_t N>
std::array<std::byte, N> array_of(const py::bytes& bytes, const char* what) {
  std::array<std::byte, N> result;
  std::ranges::copy(exactly<N>(bytes_of(bytes), what), result.begin());
  return result;
}

std::vector<PublicKeyBytes> public_keys(const py::list& keys) {
  std::vector<PublicKeyBytes> result;
  for (const py::handle key : keys)
    result.push_back(array_of<32>(py::cast<py::bytes>(key), "public key"));
  return result;
}

// A key outside of this process: a Python function signs with it.
class PythonSigner final : public Signer {
 public:
  PythonSigner(py::object sign, const py::bytes& public_key)
      : public_key_(array_of<32>(public_key, "public key")), sign_(keep_alive(std::move(sign))) {}

  PublicKeyBytes public_key() const override { return public_key_; }

  crypto::SignatureBytes sign(std::span<const std::byte> message) const override {
    crypto::SignatureBytes signature{};
    on_calling_thread([&] {
      const py::bytes asked = to_bytes(message);
      const py::object answer = call(sign_.get(), {asked.ptr()});
      if (!py::isinstance<py::bytes>(answer))
        throw py::type_error("sign(message) returned no bytes, but " +
                             py::str(py::type::handle_of(answer)).cast<std::string>());
      signature = array_of<64>(answer.cast<py::bytes>(), "the signature that sign() returned");
    });
    if (!crypto::verify(signature, message, public_key_))
      throw Error(Errc::crypto, "the signature that sign() returned does not fit its public key");
    return signature;
  }

 private:
  const PublicKeyBytes public_key_;
  const std::shared_ptr<PyObject> sign_;
};

py::list as_list(const std::vector<PublicKeyBytes>& keys) {
  py::list result;
  for (const PublicKeyBytes& key : keys) result.append(to_bytes(key));
  return result;
}

py::list signers_of(const std::vector<format::Signature>& signatures) {
  py::list result;
  for (const format::Signature& one : signatures) result.append(to_bytes(one.public_key));
  return result;
}

// Public keys of the signatures in the file, right or wrong.
py::list embedded_signers(const OpenedIndex& opened) {
  return opened.annex ? signers_of(opened.annex->signatures) : py::list();
}

py::list signers_of_detached(const OpenedIndex& opened, const py::bytes& file) {
  return signers_of(sign::signatures_of(opened, bytes_of(file)));
}

// Whether signatures by a wanted key were found and are right; None if there are no signatures.
std::optional<bool> check_signatures(OpenedIndex& opened, const py::list& wanted,
                                     const std::optional<py::bytes>& detached) {
  const std::vector<PublicKeyBytes> keys = public_keys(wanted);
  const sign::Signed found =
      detached ? sign::check_detached_signatures(opened, bytes_of(*detached), keys)
               : sign::check_embedded_signatures(opened, keys);
  if (found == sign::Signed::not_at_all) return std::nullopt;
  return found == sign::Signed::by_wanted_key;
}

sign::SignedRecords digest_records(io::RangeSource& source, const OpenedIndex& opened) {
  return run_interruptible(
      [&](const std::stop_token& stop) { return sign::digest_records(source, opened, stop); });
}

// Pairs of a public key and a signature.
py::list valid_signatures(const OpenedIndex& opened, const sign::SignedRecords& records,
                          const py::bytes& file) {
  py::list result;
  for (const format::Signature& one : sign::valid_signatures(opened, records, bytes_of(file)))
    result.append(py::make_tuple(to_bytes(one.public_key), to_bytes(one.signature)));
  return result;
}

py::bytes sign_detached(const OpenedIndex& opened, const sign::SignedRecords& records,
                        const Signer& signer,
                        const std::vector<std::pair<py::bytes, py::bytes>>& kept) {
  std::vector<format::Signature> others;
  for (const auto& [key, signature] : kept)
    others.push_back(
        {array_of<32>(key, "public key"), array_of<64>(signature, "the signature to keep")});
  return to_bytes(run_interruptible([&](const std::stop_token&) {
    return sign::sign_detached(opened, records, signer, others);
  }));
}

py::bytes derivation_chunk(const Derivation& derivation) {
  std::vector<std::byte> out;
  ByteWriter writer(out);
  format::put_derivation(writer, derivation_of(derivation));
  return to_bytes(out);
}

py::bytes marker_tag(const SecretKey& key, const py::bytes& body) {
  return to_bytes(
      crypto::keyed_hash(bytes_of(body), crypto::derive_subkey(key, crypto::KeyUse::marker)));
}

// The same with the key of a load; `derivation`: the chunk that says how it comes from a
// passphrase.
py::bytes marker_tag_of_ring(load::KeyRing& keys, const py::bytes& body,
                             const std::optional<py::bytes>& derivation) {
  std::vector<format::KeyDerivation> derivations;
  if (derivation) {
    ByteCursor cursor(bytes_of(*derivation), "key derivation");
    derivations.push_back(format::read_derivation(cursor));
    if (cursor.remaining() > 0) cursor.fail("key derivation", "too long");
  }
  const auto key =
      run_interruptible([&](const std::stop_token&) { return keys.key_for(derivations); });
  return marker_tag(*key, body);
}

}  // namespace

void register_authenticity(py::module_& m) {
  py::class_<Signer, std::shared_ptr<Signer>>(m, "Signer", "An Ed25519 key that signs.")
      .def(py::init([](const SecretKey& seed) {
             return std::make_shared<crypto::SeedSigner>(SecretKey(seed.bytes()));
           }),
           py::arg("seed"))
      .def(py::init([](py::function sign, const py::bytes& public_key) {
             return std::make_shared<PythonSigner>(std::move(sign), public_key);
           }),
           py::arg("sign"), py::arg("public_key"))
      .def_property_readonly("public_key", [](const Signer& s) { return to_bytes(s.public_key()); })
      .def("sign", [](const Signer& s,
                      const py::bytes& message) { return to_bytes(s.sign(bytes_of(message))); })
      .def("__repr__", [](const Signer&) { return "<Signer>"; });
  m.def(
      "read_seed",
      [](const py::buffer& text) {
        return std::make_shared<SecretKey>(crypto::read_seed(BytesView(text).bytes()));
      },
      py::arg("text"));
  m.def("is_public_key", [](const py::bytes& key) {
    return crypto::is_public_key(array_of<32>(key, "public key"));
  });
  m.def("derivation_chunk", &derivation_chunk, py::arg("derivation"));
  m.def("marker_tag", &marker_tag, py::arg("key"), py::arg("body"));
  m.def("marker_tag_of", &marker_tag_of_ring, py::arg("keys"), py::arg("body"),
        py::arg("derivation"));
  m.def(
      "check_tag",
      [](OpenedIndex& opened, load::KeyRing& keys) {
        if (!opened.annex || !opened.annex->tag) return;
        const Where where = opened.annex->tag->derivation ? Where::helper_thread : Where::here;
        run_interruptible(where, [&](const std::stop_token&) { sign::check_tag(opened, keys); });
      },
      py::arg("index"), py::arg("keys"));
  m.def(
      "check_marks",
      [](io::RangeSource& source, const OpenedIndex& opened, load::KeyRing& keys) {
        run_interruptible(
            [&](const std::stop_token& stop) { sign::check_marks(source, opened, keys, stop); });
      },
      py::arg("source"), py::arg("index"), py::arg("keys"));
  m.def("check_signatures", &check_signatures, py::arg("index"), py::arg("wanted"),
        py::arg("detached") = py::none());
  m.def("signers_of_detached", &signers_of_detached, py::arg("index"), py::arg("file"));
  py::class_<sign::SignedRecords>(m, "SignedRecords")
      .def_readonly("unbound", &sign::SignedRecords::unbound);
  m.def("digest_records", &digest_records, py::arg("source"), py::arg("index"));
  m.def("valid_signatures", &valid_signatures, py::arg("index"), py::arg("records"),
        py::arg("file"));
  m.def("sign_detached", &sign_detached, py::arg("index"), py::arg("records"), py::arg("signer"),
        py::arg("kept"));
  m.def(
      "index_digest",
      [](const OpenedIndex& opened) { return to_bytes(sign::index_digest(opened)); },
      py::arg("index"));
  m.def("bind_records", &sign::bind_records, py::arg("index"));
  m.def("embedded_signers", &embedded_signers, py::arg("index"));
  m.def(
      "has_tag", [](const OpenedIndex& opened) { return opened.annex && opened.annex->tag; },
      py::arg("index"));
  m.def(
      "authenticated_by",
      [](const OpenedIndex& opened) {
        return py::make_tuple(opened.authenticated.by_key, as_list(opened.authenticated.signers));
      },
      py::arg("index"));
}

}  // namespace tensorizer::bind
