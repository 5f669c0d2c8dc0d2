// What a forked child finds of its parent: one thread, and everything as the others had it at that
// moment. A lock that one of them held is never given back, a condition has waiters that are not
// there, a list may hold half an entry. What a child may need is made anew in it.
#pragma once

#include <atomic>
#include <cstdint>
#include <new>
#include <thread>

namespace tensorizer {

// How many forks lie between the process that has loaded this library and this one. Even; a child
// has a number that its parent never has.
uint64_t fork_generation() noexcept;

// The process that has made an object, or has made its name, its threads or its connections. A
// forked child, which has a copy of the object, leaves those alone.
class OwnerProcess {
 public:
  OwnerProcess() noexcept : generation_(fork_generation()) {}

  bool is_this_one() const noexcept { return generation_ == fork_generation(); }

 private:
  uint64_t generation_;
};

// A T that a forked child has anew, made when it is first asked for there. What the parent has made
// is neither used nor destroyed in the child. Safe from many threads; T locks itself.
template <class T>
class FreshInChild {
 public:
  FreshInChild() : made_in_(fork_generation()) { ::new (static_cast<void*>(&value_)) T(); }
  ~FreshInChild() {
    if (T* mine = current()) mine->~T();
  }
  FreshInChild(const FreshInChild&) = delete;
  FreshInChild& operator=(const FreshInChild&) = delete;

  T& get() {
    const uint64_t now = fork_generation();
    if (made_in_.load(std::memory_order_acquire) != now) make(now);
    return value_;
  }
  T& operator*() { return get(); }
  T* operator->() { return &get(); }
  // nullptr where this process has made none yet.
  T* current() noexcept {
    return made_in_.load(std::memory_order_acquire) == fork_generation() ? &value_ : nullptr;
  }

 private:
  void make(uint64_t now) {
    const uint64_t making = now + 1;
    for (uint64_t seen = made_in_.load(std::memory_order_acquire); seen != now;) {
      if (seen == making) {
        std::this_thread::yield();
        seen = made_in_.load(std::memory_order_acquire);
      } else if (made_in_.compare_exchange_weak(seen, making, std::memory_order_acquire)) {
        try {
          ::new (static_cast<void*>(&value_)) T();
        } catch (...) {
          made_in_.store(seen, std::memory_order_release);
          throw;
        }
        made_in_.store(now, std::memory_order_release);
        return;
      }
    }
  }

  union {
    T value_;
  };
  std::atomic<uint64_t> made_in_;  // the generation, or one more while it is being made
};

}  // namespace tensorizer
