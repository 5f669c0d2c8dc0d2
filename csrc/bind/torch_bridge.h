// Memory to torch tensors and back, without linking torch: DLPack one way, attributes the other.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "device/tensor_memory.h"

namespace tensorizer::bind {

namespace py = pybind11;

// How a stored dtype becomes a tensor.
struct TensorDtype {
  uint8_t code = 0;  // DLDataTypeCode
  uint8_t bits = 0;
  uint16_t lanes = 1;
  py::object torch_dtype;  // of the finished tensor
  bool reinterpret =
      false;  // DLPack cannot say it: made as integers of the same width, then viewed
  bool differentiable = false;  // requires_grad of the Parameter
};

// Where tensors are: on the CPU, or where torch allocates.
struct TensorPlace {
  static TensorPlace cpu();
  // Of an existing tensor.
  explicit TensorPlace(const py::object& tensor);

  py::object torch_device;
  int32_t dlpack_type;  // DLDeviceType
  int32_t dlpack_id;
};

pybind11::tuple shape_tuple(std::span<const uint64_t> shape);

// Makes tensors and parameters. Confined to the thread that holds the interpreter lock.
class TensorFactory {
 public:
  // `resolve(stored_dtype) -> (dlpack code, bits, torch dtype, reinterpret, differentiable)` is
  // asked once per distinct stored dtype; it raises for names that torch does not know.
  explicit TensorFactory(py::function resolve);

  const TensorDtype& dtype(std::string_view stored);

  // A tensor over `memory`, whose owner it keeps alive; its storage is exactly the tensor's bytes.
  py::object tensor(const TensorDtype& dtype, std::span<const uint64_t> shape,
                    const device::TensorMemory& memory, const TensorPlace& place);

  // torch.nn.Parameter(tensor, requires_grad=dtype.differentiable), without its checks, of a tensor
  // that tensor() has made and no other object holds.
  py::object parameter(py::object tensor, const TensorDtype& dtype);

 private:
  py::function resolve_;
  py::object from_dlpack_, make_subclass_, parameter_type_, empty_, view_;
  const py::str class_name_{"__class__"}, requires_grad_name_{"requires_grad"};
  std::map<std::string, TensorDtype, std::less<>> dtypes_;
};

}  // namespace tensorizer::bind
