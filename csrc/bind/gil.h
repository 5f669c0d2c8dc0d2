// The interpreter lock: how calls wait without it, how C++ keeps Python objects, and how threads of
// C++ call them.
#pragma once

#include <pybind11/pybind11.h>

#include <chrono>
#include <memory>
#include <optional>
#include <set>
#include <system_error>
#include <type_traits>
#include <utility>

#include "bind/calling_thread.h"
#include "core/error.h"
#include "core/task_group.h"

namespace tensorizer::bind {

namespace py = pybind11;

inline constexpr std::chrono::milliseconds kSignalPollInterval{50};

// True once Py_Finalize has begun: taking the lock would hang or end the thread.
inline bool interpreter_is_finalizing() noexcept {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsFinalizing() != 0;
#else
  return _Py_IsFinalizing() != 0;
#endif
}

// Every wait that runs right now, so that the interpreter can end them before it takes itself
// apart. Internally locked.
class ActiveWork {
 public:
  static ActiveWork& instance();

  // From construction to destruction of a Scope its group is stopped when the interpreter exits.
  // Throws Error(cancelled) once that has begun. REQUIRES: the lock is held at both ends.
  class Scope {
   public:
    explicit Scope(TaskGroup& group) : group_(group) { instance().add(group); }
    ~Scope() { instance().remove(group_); }

    // True once the interpreter exits.
    bool shutting_down() const noexcept { return instance().shutting_down(); }

    // Gives up the group, which has ended, and never returns. For a thread that finds the
    // interpreter exiting: it is a daemon thread, and the next attempt to take the lock could be
    // its end in the middle of C++ frames, which aborts the process. REQUIRES: the lock is not
    // held.
    [[noreturn]] void stay() noexcept;

    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    TaskGroup& group_;
  };

  // Stops everything and waits until nothing runs, or `timeout` is over. Called without the lock.
  void shut_down(std::chrono::milliseconds timeout);

 private:
  void add(TaskGroup& group);
  void remove(TaskGroup& group) noexcept;
  bool shutting_down() const noexcept;

  mutable Mutex mutex_;
  CondVar changed_;
  std::set<TaskGroup*> groups_ GUARDED_BY(mutex_);
  bool shutting_down_ GUARDED_BY(mutex_) = false;
};

// Where work runs while its caller waits; also here where the system has no thread to give. `here`
// is for work of a few milliseconds at most:
// Ctrl-C is not looked for meanwhile, and no thread has to be woken.
enum class Where { helper_thread, here };

// Starts `work` on a thread that works for `calling` and tells it the end.
template <class Work>
void spawn_for(CallingThread& calling, TaskGroup& group, const Work& work) {
  Caller* const outer = std::exchange(current_caller(), &calling);
  struct Restore {
    Caller* outer;
    ~Restore() { current_caller() = outer; }
  } const restore{outer};
  group.spawn([&calling, &work](const std::stop_token& stop) {
    struct Finish {
      CallingThread& calling;
      ~Finish() { calling.finish(); }
    } const finish{calling};
    work(stop);
  });
}

// Runs fn(stop_token) on a thread of its own while this one waits without the lock, does what fn
// asks of it (calling_thread.h) and looks for Ctrl-C every 50 ms. On a signal whose handler raises,
// fn is asked to stop and joined before the exception leaves. on_poll() is called with the lock
// held at every look and once at the end; what it raises ends the work like a signal. When the
// interpreter exits meanwhile, this does not return: on_exit() undoes work that was half done.
// REQUIRES: the caller holds the lock. fn and on_exit must not touch Python objects without taking
// it; on_exit must not throw.
template <class Fn, class Poll, class Exit>
auto run_interruptible(Where where, Fn&& fn, Poll&& on_poll, Exit&& on_exit) {
  using Result = std::invoke_result_t<Fn&, const std::stop_token&>;
  constexpr bool kVoid = std::is_void_v<Result>;
  std::optional<std::conditional_t<kVoid, char, Result>> result;
  CallingThread calling;  // outlives the threads that work for it
  TaskGroup group;
  std::exception_ptr interruption;  // the exception that Python raised while waiting
  auto next_look = std::chrono::steady_clock::now() + kSignalPollInterval;
  auto look = [&] {
    const InterpreterLock locked;
    next_look = std::chrono::steady_clock::now() + kSignalPollInterval;
    try {
      if (PyErr_CheckSignals() != 0) throw py::error_already_set();
      on_poll();
    } catch (py::error_already_set&) {
      interruption = std::current_exception();
      calling.refuse();
      calling.interrupt();
    }
  };
  ActiveWork::Scope active(group);
  {
    const InterpreterUnlock unlocked;
    auto work = [&](const std::stop_token& stop) {
      if constexpr (kVoid) {
        fn(stop);
        result.emplace();
      } else {
        result.emplace(fn(stop));
      }
    };
    bool here = where == Where::here;
    try {
      if (!here) spawn_for(calling, group, work);
    } catch (const std::system_error&) {  // no thread to be had
      here = true;
    }
    if (!here) {
      while (!interruption) {
        const auto event = calling.wait(kSignalPollInterval);
        if (event == CallingThread::Event::finished) break;
        if (event == CallingThread::Event::work) {
          const InterpreterLock locked;
          calling.serve();
        }
        if (std::chrono::steady_clock::now() >= next_look) look();
      }
      calling.refuse();
      if (interruption) group.request_stop();
    }
    std::exception_ptr failure;
    try {
      if (here) work(group.stop_token());
      group.join();
    } catch (...) {
      failure = std::current_exception();
    }
    if (active.shutting_down()) {
      on_exit();
      active.stay();
    }
    if (!failure && !interruption) look();
    if (failure && !interruption) std::rethrow_exception(failure);  // an interruption tells more
  }
  if (interruption) std::rethrow_exception(interruption);
  if constexpr (!kVoid) return std::move(*result);
}

template <class Fn, class Poll>
auto run_interruptible(Where where, Fn&& fn, Poll&& on_poll) {
  return run_interruptible(where, std::forward<Fn>(fn), std::forward<Poll>(on_poll), [] {});
}

template <class Fn>
auto run_interruptible(Where where, Fn&& fn) {
  return run_interruptible(where, std::forward<Fn>(fn), [] {}, [] {});
}

template <class Fn>
auto run_interruptible(Fn&& fn) {
  return run_interruptible(Where::helper_thread, std::forward<Fn>(fn));
}

// For a binding of object.method(stop_token).
template <class Object, class Result>
auto interruptible(Result (Object::*method)(const std::stop_token&)) {
  return [method](Object& object) {
    return run_interruptible([&](const std::stop_token& stop) { return (object.*method)(stop); });
  };
}

// Keeps a Python object alive from C++. Takes the lock to release it, from whichever thread; leaks
// on purpose once the interpreter is finalizing. Safe to destroy anywhere.
inline std::shared_ptr<PyObject> keep_alive(py::object object) {
  return std::shared_ptr<PyObject>(object.release().ptr(), [](PyObject* held) {
    if (interpreter_is_finalizing()) return;
    const InterpreterLock locked;
    Py_XDECREF(held);
  });
}

// The exception of Python as an Error that may be kept, rethrown any number of times and destroyed
// anywhere. Back at the border it becomes the exception it was (errors.cpp).
class PythonError : public Error {
 public:
  explicit PythonError(const py::error_already_set& raised)
      : Error(Errc::io, raised.what()),
        exception_(keep_alive(py::reinterpret_borrow<py::object>(raised.value()))) {}

  // REQUIRES: the caller holds the lock.
  py::handle exception() const noexcept { return exception_.get(); }

 private:
  std::shared_ptr<PyObject> exception_;
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
