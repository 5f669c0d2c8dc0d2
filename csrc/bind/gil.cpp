#include "bind/gil.h"

#include <unistd.h>

#include "core/error.h"
#include "core/per_process.h"

namespace tensorizer::bind {

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
