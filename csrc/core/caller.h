// The call that a thread works for: whoever waits for it may have to do some of its work. Made and
// used by bind/; threads of a TaskGroup inherit it from the thread that spawns them.
#pragma once

namespace tensorizer {

class Caller {
 protected:
  ~Caller() = default;
};

// Of this thread; null where it works for nobody.
inline Caller*& current_caller() noexcept {
  static thread_local Caller* caller = nullptr;
  return caller;
}

}  // namespace tensorizer
