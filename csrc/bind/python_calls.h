// Calls into Python from threads that the interpreter may want to end.
//
// A thread that needs the lock of an interpreter that has exited is ended by unwinding its stack
// (before Python 3.14), which aborts the process at the first C++ frame that catches everything or
// throws nothing. Such threads stay here instead, for ever, and end with the process.
#pragma once

#include <pybind11/pybind11.h>
#include <unistd.h>

#include <exception>
#include <initializer_list>
#include <optional>
#include <type_traits>

namespace tensorizer::bind {

// fn(), or no return. REQUIRES: fn has nothing to destroy that needs the lock.
template <class Fn>
auto or_stay(Fn&& fn) {
  // A destructor: catching what is no C++ exception is not possible with every library.
  struct Stay {
    const int exceptions = std::uncaught_exceptions();
    bool returned = false;
    ~Stay() {
      while (!returned && std::uncaught_exceptions() == exceptions) ::pause();
    }
  } stay;
  if constexpr (std::is_void_v<std::invoke_result_t<Fn&>>) {
    fn();
    stay.returned = true;
  } else {
    auto result = fn();
    stay.returned = true;
    return result;
  }
}

// Holds the interpreter lock.
class InterpreterLock {
 public:
  InterpreterLock() {
    or_stay([this] { lock_.emplace(); });
  }
  InterpreterLock(const InterpreterLock&) = delete;
  InterpreterLock& operator=(const InterpreterLock&) = delete;

 private:
  std::optional<pybind11::gil_scoped_acquire> lock_;
};

// Lets go of the lock and takes it again. REQUIRES: it is held.
class InterpreterUnlock {
 public:
  InterpreterUnlock() : state_(PyEval_SaveThread()) {}
  ~InterpreterUnlock() {
    or_stay([this] { PyEval_RestoreThread(state_); });
  }
  InterpreterUnlock(const InterpreterUnlock&) = delete;
  InterpreterUnlock& operator=(const InterpreterUnlock&) = delete;

 private:
  PyThreadState* const state_;
};

// callable(*arguments). REQUIRES: the lock is held.
inline pybind11::object call(pybind11::handle callable,
                             std::initializer_list<PyObject*> arguments) {
  PyObject* const result = or_stay([&] {
    return PyObject_Vectorcall(callable.ptr(), std::data(arguments), arguments.size(), nullptr);
  });
  if (result == nullptr) throw pybind11::error_already_set();
  return pybind11::reinterpret_steal<pybind11::object>(result);
}

// self.name(*arguments), the first of which is self. REQUIRES: the lock is held.
inline pybind11::object call_method(const char* name, std::initializer_list<PyObject*> arguments) {
  const pybind11::str text(name);
  PyObject* const result = or_stay([&] {
    return PyObject_VectorcallMethod(text.ptr(), std::data(arguments), arguments.size(), nullptr);
  });
  if (result == nullptr) throw pybind11::error_already_set();
  return pybind11::reinterpret_steal<pybind11::object>(result);
}

}  // namespace tensorizer::bind
