// One register function per binding file; module.cpp calls them all.
#pragma once

#include <pybind11/pybind11.h>

namespace tensorizer::bind {

void register_cuda(pybind11::module_& m);
void register_errors(pybind11::module_& m);
void register_io(pybind11::module_& m);
void register_file(pybind11::module_& m);
void register_crypto(pybind11::module_& m);
void register_authenticity(pybind11::module_& m);
void register_load(pybind11::module_& m);
void register_slices(pybind11::module_& m);
void register_save(pybind11::module_& m);
void register_http(pybind11::module_& m);
void register_multipart(pybind11::module_& m);
void register_redis(pybind11::module_& m);
void register_plain(pybind11::module_& m);
void register_safetensors(pybind11::module_& m);
void register_versions(pybind11::module_& m);

}  // namespace tensorizer::bind
