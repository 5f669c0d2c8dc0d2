// Children that are forked while threads of their parent are at work.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <functional>

namespace tensorizer::testing {

// Forks, and returns whether `in_child` returns true there within a minute. True under TSan, whose
// own locks stop a child of a process with threads.
inline bool ends_well_in_child(const std::function<bool()>& in_child) {
#if defined(TENSORIZER_TSAN)
  static_cast<void>(in_child);
  return true;
#else
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);
    _exit(in_child() ? 0 : 1);
  }
  int status = -1;
  return waitpid(child, &status, 0) == child && status == 0;
#endif
}

}  // namespace tensorizer::testing
