#include "bind/gil.h"

#include <pthread.h>
#include <setjmp.h>
#include <unistd.h>

#include "core/error.h"
#include "core/per_process.h"

#if defined(__GLIBC__)
// What pthread_cleanup_push() is made of in C. Its form for C++, a destructor, is called by the C++
// library of this module, which may be another one than that which unwinds.
extern "C" {
void __pthread_register_cancel(__pthread_unwind_buf_t* buffer);
void __pthread_unregister_cancel(__pthread_unwind_buf_t* buffer);
}
#endif

namespace tensorizer::bind {

void call_or_stay(void (*function)(void*), void* argument) {
#if defined(__GLIBC__)
  union {
    __pthread_unwind_buf_t buffer;
    jmp_buf jump;  // begins as the buffer does, and is what __sigsetjmp() takes
  } end;
  if (__sigsetjmp(end.jump, 0) != 0)
    for (;;) ::pause();
  __pthread_register_cancel(&end.buffer);
  function(argument);
  __pthread_unregister_cancel(&end.buffer);
#else
  function(argument);
#endif
}

// A forked child does not continue the parent's work: the threads that would end it are not
// there.
ActiveWork& ActiveWork::instance() {
  static PerProcess<ActiveWork> work;
  return work.get();
}

void ActiveWork::add(TaskGroup& group) {
  MutexLock lock(mutex_);
  if (shutting_down_) throw Error(Errc::cancelled, "the interpreter is shutting down");
  groups_.insert(&group);
}

void ActiveWork::remove(TaskGroup& group) noexcept {
  MutexLock lock(mutex_);
  groups_.erase(&group);
  changed_.notify_all();
}

bool ActiveWork::shutting_down() const noexcept {
  MutexLock lock(mutex_);
  return shutting_down_;
}

void ActiveWork::Scope::stay() noexcept {
  instance().remove(group_);
  for (;;) ::pause();
}

void ActiveWork::shut_down(std::chrono::milliseconds timeout) {
  MutexLock lock(mutex_);
  shutting_down_ = true;
  for (TaskGroup* group : groups_) group->request_stop();
  changed_.wait_until(mutex_, std::stop_token(), std::chrono::steady_clock::now() + timeout,
                      [this]() REQUIRES_LOCK(mutex_) { return groups_.empty(); });
}

}  // namespace tensorizer::bind
