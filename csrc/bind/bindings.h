// One register function per binding file, which module.cpp calls, and what several of them need.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <span>
#include <string_view>

namespace tensorizer::bind {

inline pybind11::bytes to_bytes(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}
inline pybind11::bytes to_bytes(std::string_view text) { return {text.data(), text.size()}; }

// What calls progress(nbytes_done()), where the caller of a binding wants to know.
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
void register_plain(pybind11::module_& m);
void register_safetensors(pybind11::module_& m);
void register_versions(pybind11::module_& m);

}  // namespace tensorizer::bind
