// Makes a device's primary context current for this thread, and its driver calls invisible to a
// stream capture that some other thread may be running: for a few calls, so that no
// thread waits, or ends, with a context. Confined to one thread.
#pragma once

#include "device/cuda/driver.h"

namespace tensorizer::device::cuda {

class ContextGuard {
 public:
  ContextGuard(const Driver& driver, Context context)
      : driver_(driver), capture_mode_(kCaptureModeRelaxed) {
    check(driver_, driver_.cuCtxPushCurrent(context), "making the CUDA context current");
    if (driver_.cuThreadExchangeStreamCaptureMode(&capture_mode_) != kSuccess)
      capture_mode_ = kCaptureModeRelaxed;
  }
  ~ContextGuard() {
    static_cast<void>(driver_.cuThreadExchangeStreamCaptureMode(&capture_mode_));
    Context popped = nullptr;
    static_cast<void>(driver_.cuCtxPopCurrent(&popped));
  }
  ContextGuard(const ContextGuard&) = delete;
  ContextGuard& operator=(const ContextGuard&) = delete;

 private:
  const Driver& driver_;
  int capture_mode_;
};

}  // namespace tensorizer::device::cuda
