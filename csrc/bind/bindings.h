// One register function per binding file, which module.cpp calls, and helpers of several of them.
#pragma once

#include <pybind11/pybind11.h>

#include <chrono>
#include <cmath>
#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <tuple>

#include "core/error.h"
#include "format/crypt_info.h"

namespace tensorizer::bind {

inline pybind11::bytes to_bytes(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}
inline pybind11::bytes to_bytes(std::string_view text) { return {text.data(), text.size()}; }

inline std::span<const std::byte> bytes_of(const pybind11::bytes& bytes) {
  return std::as_bytes(std::span(static_cast<std::string_view>(bytes)));
}

// To be filled by contents().
inline pybind11::bytes new_bytes(size_t nbytes) {
  PyObject* const result = PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(nbytes));
  if (result == nullptr) throw pybind11::error_already_set();
  return pybind11::reinterpret_steal<pybind11::bytes>(result);
}
inline std::span<std::byte> contents(const pybind11::bytes& bytes) {
  return {reinterpret_cast<std::byte*>(PyBytes_AS_STRING(bytes.ptr())),
          static_cast<size_t>(PyBytes_GET_SIZE(bytes.ptr()))};
}

// The bytes of a contiguous bytes-like object, borrowed for one call.
class BytesView {
 public:
  explicit BytesView(pybind11::handle object, bool writable = false) {
    if (PyObject_GetBuffer(object.ptr(), &buffer_, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE) != 0)
      throw pybind11::error_already_set();
  }
  ~BytesView() { PyBuffer_Release(&buffer_); }
  BytesView(const BytesView&) = delete;
  BytesView& operator=(const BytesView&) = delete;

  std::span<const std::byte> bytes() const { return writable_bytes(); }
  // REQUIRES: they are.
  std::span<std::byte> writable_bytes() const {
    return {static_cast<std::byte*>(buffer_.buf), static_cast<size_t>(buffer_.len)};
  }

 private:
  Py_buffer buffer_{};
};

// The same as a span of fixed length. Throws Error(invalid_argument) for another length.
template <size_t N>
std::span<const std::byte, N> exactly(std::span<const std::byte> bytes, const char* what) {
  if (bytes.size() == N) return std::span<const std::byte, N>(bytes);
  throw Error(Errc::invalid_argument, std::string(what) + ": expected " + std::to_string(N) +
                                          " bytes, got " + std::to_string(bytes.size()));
}

// How a key comes from a passphrase: opslimit, memlimit, salt.
using Derivation = std::tuple<uint64_t, uint64_t, pybind11::bytes>;
inline format::KeyDerivation derivation_of(const Derivation& derivation) {
  const auto& [opslimit, memlimit, salt] = derivation;
  const auto bytes = bytes_of(salt);
  return {.opslimit = opslimit, .memlimit = memlimit, .salt = {bytes.begin(), bytes.end()}};
}

inline std::chrono::milliseconds milliseconds_of(double seconds) {
  return std::chrono::milliseconds(std::llround(seconds * 1e3));
}

// Calls progress(nbytes_done()), if the caller of a binding passed `progress`.
template <class NbytesDone>
auto report_to(const pybind11::object& progress, NbytesDone nbytes_done) {
  return [&progress, nbytes_done] {
    if (!progress.is_none()) progress(nbytes_done());
  };
}

void register_cache(pybind11::module_& m);
void register_cuda(pybind11::module_& m);
void register_errors(pybind11::module_& m);
void register_io(pybind11::module_& m);
void register_file(pybind11::module_& m);
void register_crypto(pybind11::module_& m);
void register_authenticity(pybind11::module_& m);
void register_load(pybind11::module_& m);
void register_batch(pybind11::module_& m);
void register_save(pybind11::module_& m);
void register_http(pybind11::module_& m);
void register_multipart(pybind11::module_& m);
void register_redis(pybind11::module_& m);
void register_safetensors(pybind11::module_& m);
void register_sync(pybind11::module_& m);
void register_versions(pybind11::module_& m);

}  // namespace tensorizer::bind
