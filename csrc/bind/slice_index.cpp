#include "bind/slice_index.h"

#include <string>

namespace tensorizer::bind {
namespace {

namespace py = pybind11;

class Parser {
 public:
  explicit Parser(std::span<const uint64_t> shape) : shape_(shape) {
    result_.box.reserve(shape.size());
    result_.result_shape.reserve(shape.size());
  }

  SliceIndex parse(py::handle index) {
    const bool is_tuple = PyTuple_Check(index.ptr()) != 0;
    const Py_ssize_t items = is_tuple ? PyTuple_GET_SIZE(index.ptr()) : 1;
    const auto item = [&](Py_ssize_t i) {
      return is_tuple ? PyTuple_GET_ITEM(index.ptr(), i) : index.ptr();
    };
    size_t named = 0;  // dimensions that the index names
    for (Py_ssize_t i = 0; i < items; ++i)
      if (item(i) != Py_None && item(i) != Py_Ellipsis) ++named;
    if (named > shape_.size()) refuse_too_many();
    for (Py_ssize_t i = 0; i < items; ++i) take(item(i), shape_.size() - named);
    take_whole(shape_.size() - result_.box.size());
    return std::move(result_);
  }

 private:
  [[noreturn]] void refuse_too_many() const {
    if (shape_.empty())
      throw py::index_error(
          "invalid index of a 0-dim tensor. Use `tensor.item()` in Python or `tensor.item<T>()` in "
          "C++ to convert a 0-dim tensor to a number");
    throw py::index_error("too many indices for tensor of dimension " +
                          std::to_string(shape_.size()));
  }

  void take(PyObject* item, size_t not_named) {
    if (item == Py_None) {
      result_.result_shape.push_back(1);
    } else if (item == Py_Ellipsis) {
      take_whole(not_named);
    } else if (PySlice_Check(item)) {
      take_slice(item);
    } else if (PyLong_Check(item) && !PyBool_Check(item)) {
      take_one(item);
    } else {
      throw py::type_error(std::string("an index of type ") + Py_TYPE(item)->tp_name);
    }
  }

  uint64_t next_dim() const {
    if (result_.box.size() >= shape_.size()) refuse_too_many();
    return shape_[result_.box.size()];
  }

  void take_whole(size_t count) {
    for (; count > 0; --count) add({0, next_dim(), 1});
  }

  void add(load::SliceDim dim) {
    result_.box.push_back(dim);
    result_.result_shape.push_back(dim.count);
  }

  void take_one(PyObject* item) {
    const auto size = static_cast<int64_t>(next_dim());
    const Py_ssize_t i = PyLong_AsSsize_t(item);
    if (i == -1 && PyErr_Occurred() != nullptr) {
      PyErr_Clear();
      throw py::index_error("an index beyond 64 bits is out of bounds for dimension " +
                            std::to_string(result_.box.size()) + " with size " +
                            std::to_string(size));
    }
    if (i < -size || i >= size)
      throw py::index_error("index " + std::to_string(i) + " is out of bounds for dimension " +
                            std::to_string(result_.box.size()) + " with size " +
                            std::to_string(size));
    result_.box.push_back({static_cast<uint64_t>(i < 0 ? i + size : i), 1, 1});
  }

  void take_slice(PyObject* item) {
    Py_ssize_t start = 0, stop = 0, stride = 0;
    if (PySlice_Unpack(item, &start, &stop, &stride) < 0) throw py::error_already_set();
    if (stride < 0) throw py::value_error("step must be greater than zero");
    const auto size = static_cast<Py_ssize_t>(next_dim());
    const Py_ssize_t count = PySlice_AdjustIndices(size, &start, &stop, stride);
    add({static_cast<uint64_t>(count == 0 ? 0 : start), static_cast<uint64_t>(count),
         static_cast<uint64_t>(stride)});
  }

  const std::span<const uint64_t> shape_;
  SliceIndex result_;
};

}  // namespace

SliceIndex parse_slice_index(py::handle index, std::span<const uint64_t> shape) {
  return Parser(shape).parse(index);
}

}  // namespace tensorizer::bind
