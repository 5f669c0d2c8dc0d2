#include "bind/torch_bridge.h"

#include <ATen/dlpack.h>

#include <algorithm>

#include "bind/gil.h"
#include "bind/python_calls.h"

namespace tensorizer::bind {
namespace {

// The struct that a DLPack capsule points to; shape and strides follow the struct in one
// allocation.
struct Export {
  DLManagedTensor managed;
  std::shared_ptr<void> owner;
  int64_t dims[];  // NOLINT: shape, then strides
};

void destroy(Export* exported) noexcept {
  exported->~Export();
  ::operator delete(exported);
}

Export* make_export(const TensorDtype& dtype, std::span<const uint64_t> shape,
                    const device::TensorMemory& memory, const TensorPlace& place) {
  const size_t ndim = shape.size();
  auto* exported = new (::operator new(sizeof(Export) + 2 * ndim * sizeof(int64_t))) Export{};
  exported->owner = memory.owner;
  int64_t stride = 1;
  for (size_t i = ndim; i-- > 0;) {
    exported->dims[i] = static_cast<int64_t>(shape[i]);
    exported->dims[ndim + i] = stride;
    stride *= std::max<int64_t>(exported->dims[i], 1);
  }
  DLTensor& tensor = exported->managed.dl_tensor;
  tensor.data = memory.data;
  tensor.device = {static_cast<DLDeviceType>(place.dlpack_type), place.dlpack_id};
  tensor.ndim = static_cast<int32_t>(ndim);
  tensor.dtype = {dtype.code, dtype.bits, dtype.lanes};
  tensor.shape = exported->dims;
  tensor.strides = exported->dims + ndim;
  exported->managed.manager_ctx = exported;
  exported->managed.deleter = [](DLManagedTensor* self) {
    destroy(static_cast<Export*>(self->manager_ctx));
  };
  return exported;
}

// Called for capsules that were not consumed: a consumer renames the capsule.
void drop_capsule(PyObject* capsule) {
  if (PyCapsule_IsValid(capsule, "dltensor") == 0) return;
  auto* managed = static_cast<DLManagedTensor*>(PyCapsule_GetPointer(capsule, "dltensor"));
  managed->deleter(managed);
}

// Not torch.empty: while models are built, no_init_or_tensor has another function there.
py::object torch_empty() { return py::module_::import("tensorizer._system.devices").attr("empty"); }

}  // namespace

TensorPlace TensorPlace::cpu() { return TensorPlace(torch_empty()(0, py::arg("device") = "cpu")); }

TensorPlace::TensorPlace(const py::object& tensor) : torch_device(tensor.attr("device")) {
  const py::tuple dlpack = tensor.attr("__dlpack_device__")();
  dlpack_type = py::int_(dlpack[0]).cast<int32_t>();
  dlpack_id = py::int_(dlpack[1]).cast<int32_t>();
}

TensorFactory::TensorFactory(py::function resolve) : resolve_(std::move(resolve)) {
  const py::module_ torch = py::module_::import("torch");
  from_dlpack_ = torch.attr("utils").attr("dlpack").attr("from_dlpack");
  if (py::hasattr(torch.attr("_C"), "_from_dlpack"))
    from_dlpack_ = torch.attr("_C").attr("_from_dlpack");
  make_subclass_ = torch.attr("Tensor").attr("_make_subclass");
  parameter_type_ = torch.attr("nn").attr("Parameter");
  empty_ = torch_empty();
  view_ = torch.attr("Tensor").attr("view");
}

const TensorDtype& TensorFactory::dtype(std::string_view stored) {
  if (auto known = dtypes_.find(stored); known != dtypes_.end()) return known->second;
  const py::tuple resolved = resolve_(py::bytes(stored.data(), stored.size()));
  TensorDtype dtype;
  dtype.code = resolved[0].cast<uint8_t>();
  dtype.bits = resolved[1].cast<uint8_t>();
  dtype.torch_dtype = resolved[2];
  dtype.reinterpret = resolved[3].cast<bool>();
  dtype.differentiable = resolved[4].cast<bool>();
  return dtypes_.emplace(std::string(stored), std::move(dtype)).first->second;
}

py::object TensorFactory::tensor(const TensorDtype& dtype, std::span<const uint64_t> shape,
                                 const device::TensorMemory& memory, const TensorPlace& place) {
  if (std::find(shape.begin(), shape.end(), 0) != shape.end()) {
    return empty_(shape_tuple(shape), py::arg("dtype") = dtype.torch_dtype,
                  py::arg("device") = place.torch_device);
  }
  Export* exported = make_export(dtype, shape, memory, place);
  PyObject* raw = PyCapsule_New(&exported->managed, "dltensor", &drop_capsule);
  if (raw == nullptr) {
    destroy(exported);
    throw py::error_already_set();
  }
  const auto capsule = py::reinterpret_steal<py::object>(raw);
  py::object tensor = call(from_dlpack_, {capsule.ptr()});
  if (!dtype.reinterpret) return tensor;
  return call(view_, {tensor.ptr(), dtype.torch_dtype.ptr()});
}

py::object TensorFactory::parameter(py::object tensor, const TensorDtype& dtype) {
  PyObject* const requires_grad = dtype.differentiable ? Py_True : Py_False;
  if (dtype.reinterpret)  // a view, which stays one
    return call(make_subclass_, {parameter_type_.ptr(), tensor.ptr(), requires_grad});
  // A second tensor over the same bytes would take four times as long as another class for this
  // one.
  if (PyObject_SetAttr(tensor.ptr(), class_name_.ptr(), parameter_type_.ptr()) != 0 ||
      (dtype.differentiable &&
       PyObject_SetAttr(tensor.ptr(), requires_grad_name_.ptr(), requires_grad) != 0))
    throw py::error_already_set();
  return tensor;
}

py::tuple shape_tuple(std::span<const uint64_t> shape) {
  py::tuple dims(shape.size());
  for (size_t i = 0; i < shape.size(); ++i) dims[i] = py::int_(shape[i]);
  return dims;
}

}  // namespace tensorizer::bind
