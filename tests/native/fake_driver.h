// The fake CUDA driver as native tests use it: chosen, opened, and asked through its control
// functions.
#pragma once

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "device/cuda/cuda_copy.h"
#include "device/cuda/driver.h"
#include "fake_cuda/fake_cuda.h"

namespace tensorizer::device::cuda::tests {

// FAKE_CUDA_LIBRARY in the environment picks another build of the fake driver.
inline std::string fake_library() {
  const char* chosen = std::getenv("FAKE_CUDA_LIBRARY");
  return chosen && *chosen ? chosen : FAKE_CUDA_LIBRARY;
}

struct FakeDriver {
#define FAKE_CONTROL(name) \
  decltype(&fake_cuda_##name) name = find<decltype(&fake_cuda_##name)>("fake_cuda_" #name)
  FAKE_CONTROL(fail);
  FAKE_CONTROL(set_delay);
  FAKE_CONTROL(reset);
  FAKE_CONTROL(calls);
  FAKE_CONTROL(leaks);
  FAKE_CONTROL(forget_leaks);
  FAKE_CONTROL(allocate);
  FAKE_CONTROL(free);
  FAKE_CONTROL(make_stream);
  FAKE_CONTROL(destroy_stream);
  FAKE_CONTROL(compute);
  FAKE_CONTROL(wait);
  FAKE_CONTROL(hold);
  FAKE_CONTROL(let_go);
  FAKE_CONTROL(allow_pageable);
  FAKE_CONTROL(break_kernels);
  FAKE_CONTROL(write);
  FAKE_CONTROL(read);
  FAKE_CONTROL(set_capturing);
  FAKE_CONTROL(forbid);
  FAKE_CONTROL(model);
#undef FAKE_CONTROL

 private:
  template <class FunctionPointer>
  static FunctionPointer find(const char* name) {
    static void* const library = ::dlopen(fake_library().c_str(), RTLD_NOW | RTLD_LOCAL);
    void* function = library ? ::dlsym(library, name) : nullptr;
    if (!function) {
      ADD_FAILURE() << "the fake CUDA driver has no " << name;
      std::abort();
    }
    return reinterpret_cast<FunctionPointer>(function);
  }
};

inline const FakeDriver& fake() {
  static const FakeDriver driver;
  return driver;
}

// Work on a caller's stream that ends when this goes, or after a minute for a test that waits for
// it.
class HeldStream {
 public:
  explicit HeldStream(void* stream, int device = 0) { fake().hold(stream, device); }
  HeldStream(const HeldStream&) = delete;
  HeldStream& operator=(const HeldStream&) = delete;
  ~HeldStream() { fake().let_go(); }

  bool still_held() const { return !gave_up_; }

 private:
  std::atomic<bool> gave_up_{false};
  std::jthread watch_{[this](const std::stop_token& stop) {
    std::mutex mutex;
    std::unique_lock lock(mutex);
    std::condition_variable_any never;
    if (never.wait_for(lock, stop, std::chrono::minutes(1), [] { return false; })) return;
    if (stop.stop_requested()) return;
    gave_up_ = true;
    fake().let_go();
  }};
};

// Device memory of a caller, at rest when it is made and when it goes.
class DeviceMemory {
 public:
  explicit DeviceMemory(size_t nbytes, int device = 0, void* stream = nullptr)
      : stream_(stream),
        nbytes_(nbytes),
        data_(static_cast<std::byte*>(fake().allocate(device, nbytes))) {}
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  ~DeviceMemory() { fake().free(data_, stream_); }

  std::byte* data() const { return data_; }
  size_t size() const { return nbytes_; }
  void fill(const std::vector<std::byte>& bytes) {
    fake().write(data_, bytes.data(), bytes.size());
  }
  std::vector<std::byte> bytes() const {
    std::vector<std::byte> copy(nbytes_);
    fake().read(data_, copy.data(), nbytes_);
    return copy;
  }

 private:
  void* stream_;
  size_t nbytes_;
  std::byte* data_;
};

// The end of a program that used CUDA: the thread that watches for idle memory ends too.
class FakeDriverProcess : public ::testing::Environment {
 public:
  void TearDown() override { shut_down(); }
};

// Every test ends with nothing left in the driver.
class FakeDriverTest : public ::testing::Test {
 protected:
  void SetUp() override {
    set_driver_library(fake_library());
    fake().reset();
    fake().set_delay(0, 50);
    fake().allow_pageable(0);
  }
  void TearDown() override {
    for (int device = 0; device < 2; ++device) EXPECT_TRUE(release_pinned(device));
    EXPECT_STREQ(fake().leaks(), "");
  }
};

}  // namespace tensorizer::device::cuda::tests
