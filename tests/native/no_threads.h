// A system that has no thread to give.
#pragma once

#include <gtest/gtest.h>
#include <pthread.h>

#include <chrono>
#include <cstddef>
#include <filesystem>
#include <iterator>
#include <thread>

namespace tensorizer::testing {

// While one lives, no thread can be made: the stack of each would not fit the address space.
class NoThreads {
 public:
  NoThreads() {
    // Threads of the pool of the process that earlier tests have used.
    for (int i = 0; i < 1000 && threads() > kAlways; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    pthread_getattr_default_np(&before_);
    pthread_attr_t huge;
    pthread_getattr_default_np(&huge);
    EXPECT_EQ(pthread_attr_setstacksize(&huge, size_t{1} << 47), 0);
    EXPECT_EQ(pthread_setattr_default_np(&huge), 0);
    pthread_attr_destroy(&huge);
  }
  ~NoThreads() {
    pthread_setattr_default_np(&before_);
    pthread_attr_destroy(&before_);
  }

 private:
#if defined(TENSORIZER_TSAN)
  static constexpr std::ptrdiff_t kAlways = 2;  // one of the sanitizer
#else
  static constexpr std::ptrdiff_t kAlways = 1;
#endif
  static std::ptrdiff_t threads() {
    return std::distance(std::filesystem::directory_iterator("/proc/self/task"), {});
  }

  pthread_attr_t before_;
};

}  // namespace tensorizer::testing
