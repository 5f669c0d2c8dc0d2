// Host memory to torch tensors and back, without linking torch: DLPack one way, attributes the
// other.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

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

// Makes parameters. Confined to the thread that holds the interpreter lock.
class TensorFactory {
 public:
  // `resolve(stored_dtype) -> (dlpack code, bits, torch dtype, reinterpret, differentiable)` is
  // asked once per distinct stored dtype; it raises for names that torch does not know.
  explicit TensorFactory(py::function resolve);

  const TensorDtype& dtype(std::string_view stored);

  // A CPU tensor over `data`, which `owner` keeps alive; its storage is exactly the tensor's bytes.
  py::object tensor(const TensorDtype& dtype, std::span<const uint64_t> shape, std::byte* data,
                    std::shared_ptr<void> owner);

  // torch.nn.Parameter(tensor, requires_grad=differentiable), without its Python-level checks.
  py::object parameter(const py::object& tensor, bool differentiable);

 private:
  py::function resolve_;
  py::object from_dlpack_, make_subclass_, parameter_type_, empty_, view_;
  std::map<std::string, TensorDtype, std::less<>> dtypes_;
};

}  // namespace tensorizer::bind
