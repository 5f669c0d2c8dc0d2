// One table from error kind to Python class, and the translator that uses it.
#include <pybind11/pybind11.h>

#include "bind/bindings.h"
#include "bind/gil.h"
#include "bind/names.h"
#include "core/error.h"

namespace tensorizer::bind {
namespace {

namespace py = pybind11;

const char* class_name(const Error& error) {
  switch (error.code()) {
    case Errc::out_of_range:
      return "FieldRangeError";
    case Errc::malformed:
      return "FormatError";
    case Errc::unsupported:
      return "InvalidVersionError";
    case Errc::truncated:
      return "TruncatedError";
    case Errc::hash_mismatch:
      return "HashMismatchError";
    case Errc::crypto:
      return "CryptographyError";
    case Errc::authentication:
      return "AuthenticationError";
    case Errc::not_found:
      return "StreamNotFoundError";
    case Errc::io:
      return "StreamError";
    case Errc::device:
      return "DeviceError";
    case Errc::cancelled:
      return "StreamError";
    case Errc::invalid_argument:
    case Errc::out_of_memory:
      return nullptr;  // builtins
  }
  return nullptr;
}

// OSError fills errno only from its two-argument form, which also turns the message into "[Errno N]
// ...".
py::object make_exception(const Error& error) {
  const char* name = class_name(error);
  if (error.code() == Errc::invalid_argument)
    return py::handle(PyExc_ValueError)(shown(error.what()));
  if (name == nullptr) return py::handle(PyExc_MemoryError)(shown(error.what()));
  const bool from_system = error.code() == Errc::io && error.system_errno != 0;
  py::object type =
      from_system
          ? py::module_::import("tensorizer.errors").attr("stream_error_class")(error.system_errno)
          : py::module_::import("tensorizer.errors").attr(name);
  py::object exception = type(shown(error.what()));
  if (error.system_errno != 0) exception.attr("errno") = error.system_errno;
  if (error.http_status != 0) exception.attr("status") = error.http_status;
  if (!error.source.empty()) exception.attr("source") = shown(error.source);
  if (error.version) exception.attr("version") = *error.version;
  if (error.offset) exception.attr("offset") = *error.offset;
  return exception;
}

void translate(std::exception_ptr pointer) {
  try {
    if (pointer) std::rethrow_exception(pointer);
  } catch (const PythonError& error) {
    PyErr_SetObject(py::type::handle_of(error.exception()).ptr(), error.exception().ptr());
  } catch (const Error& error) {
    py::object exception = make_exception(error);
    PyErr_SetObject(py::type::handle_of(exception).ptr(), exception.ptr());
  }
}

}  // namespace

void register_errors(py::module_&) { py::register_local_exception_translator(&translate); }

}  // namespace tensorizer::bind
