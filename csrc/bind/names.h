// Tensor names between C++ paths and Python: a str, or a tuple of str and int.
#pragma once

#include <pybind11/pybind11.h>

#include <string_view>

#include "format/tensor_path.h"

namespace tensorizer::bind {

// The name as callers see it: str for one string component, else a tuple.
pybind11::object name_to_python(std::string_view stored);

// UTF-8 as a str; lone surrogates stay.
pybind11::object text_to_python(std::string_view utf8);

// Text that may hold a path of the file system: bytes that are no UTF-8 appear escaped.
pybind11::str shown(std::string_view text);

// A tuple of str and non-negative int to a path. Throws TypeError, ValueError.
format::TensorPath path_from_python(const pybind11::tuple& components);

}  // namespace tensorizer::bind
