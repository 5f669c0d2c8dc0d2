// Calls into Python from threads that the interpreter may want to end.
//
// A thread that needs the lock of an interpreter that has exited is ended by unwinding its stack
// (before Python 3.14), which aborts the process at the first C++ frame that catches everything or
// throws nothing. Such threads stay here instead, for ever, and end with the process.
#pragma once

#include <pybind11/pybind11.h>

#include <initializer_list>
#include <type_traits>

namespace tensorizer::bind {

// function(argument), or no return: where the thread is to be ended, it waits for ever.
void call_or_stay(void (*function)(void*), void* argument);

// fn(), or no return. REQUIRES: fn has nothing to destroy that needs the lock, and throws nothing.
template <class Fn>
auto or_stay(Fn&& fn) {
  using Result = std::invoke_result_t<Fn&>;
  if constexpr (std::is_void_v<Result>) {
    call_or_stay([](void* it) { (*static_cast<std::remove_reference_t<Fn>*>(it))(); }, &fn);
  } else {
    Result result{};
    or_stay([&] { result = fn(); });
    return result;
  }
}

// Holds the interpreter lock.
class InterpreterLock {
 public:
  InterpreterLock() {
    or_stay([this] { state_ = PyGILState_Ensure(); });
  }
  ~InterpreterLock() { PyGILState_Release(state_); }
  InterpreterLock(const InterpreterLock&) = delete;
  InterpreterLock& operator=(const InterpreterLock&) = delete;

 private:
  PyGILState_STATE state_{};
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
