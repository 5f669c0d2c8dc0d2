// Calls into Python from threads of C++: takes the lock, and turns what Python raises into an Error
// that may be kept, rethrown any number of times and destroyed anywhere. Back at the border it
// becomes the exception it was (errors.cpp).
#pragma once

#include <memory>

#include "bind/gil.h"
#include "core/error.h"

namespace tensorizer::bind {

class PythonError : public Error {
 public:
  explicit PythonError(const py::error_already_set& raised)
      : Error(Errc::io, raised.what()),
        exception_(keep_alive(py::reinterpret_borrow<py::object>(raised.value()))) {}

  // REQUIRES: the caller holds the lock.
  py::handle exception() const noexcept { return static_cast<PyObject*>(exception_.get()); }

 private:
  std::shared_ptr<void> exception_;
};

// fn() with the lock held. Throws PythonError.
template <class Fn>
auto call_python(Fn&& fn) {
  const InterpreterLock locked;
  try {
    return fn();
  } catch (const py::error_already_set& raised) {
    throw PythonError(raised);
  }
}

}  // namespace tensorizer::bind
