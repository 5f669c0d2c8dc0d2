#include "bind/names.h"

#include <string>

#include "core/error.h"

namespace tensorizer::bind {
namespace {

namespace py = pybind11;

py::str decoded(std::string_view utf8, const char* errors) {
  PyObject* const text =
      PyUnicode_DecodeUTF8(utf8.data(), static_cast<Py_ssize_t>(utf8.size()), errors);
  if (text == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::str>(text);
}

py::object component(const format::PathComponent& part) {
  if (const auto* name = std::get_if<std::string>(&part)) return text_to_python(*name);
  const std::string& digits = std::get<format::PathIndex>(part).digits;
  PyObject* number = PyLong_FromString(digits.c_str(), nullptr, 10);
  if (number == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(number);
}

std::string digits_of(py::handle index) {
  py::object text = py::reinterpret_steal<py::object>(PyObject_Str(index.ptr()));
  if (!text) {
    if (PyErr_ExceptionMatches(PyExc_ValueError) == 0) throw py::error_already_set();
    PyErr_Clear();  // more digits than Python writes
  } else if (std::string digits = text.cast<std::string>();
             digits.size() <= format::kMaxIndexDigits) {
    return digits;
  }
  throw Error(Errc::invalid_argument, "a tensor path holds indices of at most " +
                                          std::to_string(format::kMaxIndexDigits) +
                                          " digits, got a longer one");
}

}  // namespace

py::object text_to_python(std::string_view utf8) { return decoded(utf8, "surrogatepass"); }

py::object name_to_python(std::string_view stored) {
  if (!format::is_structured_name(stored)) return text_to_python(stored);
  const format::TensorPath path = format::decode_name(stored);
  if (path.size() == 1 && std::holds_alternative<std::string>(path[0])) return component(path[0]);
  py::tuple result(path.size());
  for (size_t i = 0; i < path.size(); ++i) result[i] = component(path[i]);
  return result;
}

format::TensorPath path_from_python(const py::tuple& components) {
  format::TensorPath path;
  path.reserve(components.size());
  for (const py::handle part : components) {
    if (py::isinstance<py::str>(part)) {
      Py_ssize_t nbytes = 0;
      if (const char* utf8 = PyUnicode_AsUTF8AndSize(part.ptr(), &nbytes)) {
        path.emplace_back(std::string(utf8, static_cast<size_t>(nbytes)));
        continue;
      }
      PyErr_Clear();  // lone surrogates: stored as escapes of a structured name
      const auto bytes = py::reinterpret_steal<py::bytes>(
          PyUnicode_AsEncodedString(part.ptr(), "utf-8", "surrogatepass"));
      if (!bytes) throw py::error_already_set();
      path.emplace_back(static_cast<std::string>(bytes));
    } else if (PyLong_Check(part.ptr()) != 0 && !PyBool_Check(part.ptr())) {
      if (py::int_(0).attr("__gt__")(part).cast<bool>())
        throw Error(Errc::invalid_argument, "a tensor path cannot hold a negative index");
      path.emplace_back(format::PathIndex{digits_of(part)});
    } else {
      throw py::type_error("a tensor path holds str and int, got " +
                           py::type::of(part).attr("__name__").cast<std::string>());
    }
  }
  if (path.empty()) throw Error(Errc::invalid_argument, "a tensor path cannot be empty");
  return path;
}

py::str shown(std::string_view text) { return decoded(text, "backslashreplace"); }

}  // namespace tensorizer::bind
