// Methods of the caller's Python objects run on the thread that made the call, while it waits:
// there Ctrl-C reaches them, and objects that belong to a thread work.
#pragma once

#include <pybind11/pybind11.h>

#include <chrono>
#include <deque>
#include <exception>
#include <functional>
#include <set>

#include "bind/python_calls.h"
#include "core/sync.h"
#include "core/task_group.h"

namespace tensorizer::bind {

// Requests of the threads of one call to the thread that waits for it. Internally locked.
class CallingThread final : public Caller {
 public:
  enum class Event { finished, work, nothing };

  // -- for the threads of the call, which do not hold the interpreter lock

  // Has `work` run with the interpreter lock held and waits for its end. Throws what it throws, and
  // Error(cancelled) once the caller does nothing more.
  void run(const std::function<void()>& work);
  // The call is over.
  void finish() noexcept;

  // -- for the thread that waits

  // Until there is something to do, or `timeout` is over. REQUIRES: the lock is not held.
  Event wait(std::chrono::milliseconds timeout);
  // Does one piece of work. REQUIRES: the lock is held.
  void serve();
  // Answers everything with Error(cancelled) from now on.
  void refuse() noexcept;

  // -- Python code that threads of the call run themselves

  // Between construction and destruction this thread runs Python code that the end of the call
  // interrupts, if it works for one. REQUIRES: the lock is held at both ends.
  class Running {
   public:
    Running();
    ~Running();
    Running(const Running&) = delete;
    Running& operator=(const Running&) = delete;

   private:
    CallingThread* const call_;
  };

  // Raises KeyboardInterrupt in that code, as soon as it gets to its next line. REQUIRES: the lock
  // is held.
  void interrupt();

 private:
  struct Work {
    const std::function<void()>* function;
    bool done = false;
    std::exception_ptr error = nullptr;
  };

  Mutex mutex_;
  CondVar changed_;
  std::deque<Work*> waiting_ GUARDED_BY(mutex_);
  std::multiset<unsigned long> running_ GUARDED_BY(mutex_);  // idents of Python threads
  bool finished_ GUARDED_BY(mutex_) = false;
  bool refuses_ GUARDED_BY(mutex_) = false;
};

// The call that this thread works for, if any.
inline CallingThread* current_call() noexcept {
  return static_cast<CallingThread*>(current_caller());
}

// fn() with the interpreter lock held: on the thread that waits for the call that this thread works
// for, or here if it does not work for another thread. REQUIRES: this thread does not hold a lock
// that fn takes.
template <class Fn>
void on_calling_thread(Fn&& fn) {
  if (CallingThread* call = current_call()) return call->run(std::forward<Fn>(fn));
  const InterpreterLock locked;
  fn();
}

}  // namespace tensorizer::bind
