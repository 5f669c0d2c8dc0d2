// The header of a .safetensors file, and its names of dtypes.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bind/bindings.h"
#include "bind/python_calls.h"
#include "format/dtype.h"
#include "format/safetensors.h"

namespace py = pybind11;

namespace tensorizer::bind {
namespace {

using format::SafetensorsTensor;

// Name, dtype as stored, shape, bytes.
using Described = std::tuple<std::string, std::string, std::vector<uint64_t>, uint64_t>;
using Metadata = std::optional<std::vector<std::pair<std::string, std::string>>>;

// Borrows `described`.
std::vector<SafetensorsTensor> tensors_of(const std::vector<Described>& described) {
  std::vector<SafetensorsTensor> tensors;
  tensors.reserve(described.size());
  for (const auto& [name, dtype, shape, nbytes] : described)
    tensors.push_back({name, dtype, shape, nbytes});
  return tensors;
}

std::optional<std::string> dtype_of(const std::string& stored) {
  const format::SafetensorsDtype* dtype = format::safetensors_dtype_of(stored);
  return dtype == nullptr ? std::nullopt : std::optional(std::string(dtype->name));
}

std::vector<uint32_t> canonical_order(const std::vector<Described>& described) {
  const std::vector<SafetensorsTensor> tensors = tensors_of(described);
  const InterpreterUnlock unlocked;
  return format::canonical_order(tensors);
}

py::bytes header(const std::vector<Described>& described, const Metadata& metadata) {
  format::Metadata texts;
  if (metadata) {
    texts.emplace();
    for (const auto& [key, value] : *metadata) texts->push_back({key, value});
  }
  return to_bytes(format::serialize_safetensors(tensors_of(described), texts));
}

}  // namespace

void register_safetensors(py::module_& m) {
  m.def("safetensors_dtype", &dtype_of, py::arg("stored"));
  m.def("safetensors_order", &canonical_order, py::arg("tensors"));
  m.def("safetensors_header", &header, py::arg("tensors"), py::arg("metadata"));
}

}  // namespace tensorizer::bind
