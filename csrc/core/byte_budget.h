// Bounds the bytes that are in flight between stages. Internally locked.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stop_token>

#include "core/error.h"
#include "core/sync.h"

namespace tensorizer {

class ByteBudget {
 public:
  explicit ByteBudget(uint64_t capacity) noexcept : capacity_(capacity), free_(capacity) {}

  // Gives its bytes back when it dies.
  class Lease {
   public:
    Lease() = default;
    Lease(ByteBudget* budget, uint64_t nbytes) noexcept : budget_(budget), nbytes_(nbytes) {}
    Lease(Lease&& other) noexcept
        : budget_(std::exchange(other.budget_, nullptr)), nbytes_(other.nbytes_) {}
    Lease& operator=(Lease&& other) noexcept {
      std::swap(budget_, other.budget_);
      std::swap(nbytes_, other.nbytes_);
      return *this;
    }
    ~Lease() {
      if (budget_) budget_->give_back(nbytes_);
    }

   private:
    ByteBudget* budget_ = nullptr;
    uint64_t nbytes_ = 0;
  };

  // Blocks until `nbytes` are free. A request above the capacity waits for all of it, so one large
  // item passes alone.
  Lease take(uint64_t nbytes, const std::stop_token& stop) {
    const uint64_t wanted = std::min(nbytes, capacity_);
    MutexLock lock(mutex_);
    if (!changed_.wait(mutex_, stop, [&]() REQUIRES_LOCK(mutex_) { return free_ >= wanted; }))
      throw Error(Errc::cancelled, "cancelled");
    free_ -= wanted;
    return {this, wanted};
  }

 private:
  void give_back(uint64_t nbytes) noexcept {
    MutexLock lock(mutex_);
    free_ += nbytes;
    changed_.notify_all();
  }

  const uint64_t capacity_;
  Mutex mutex_;
  CondVar changed_;
  uint64_t free_ GUARDED_BY(mutex_);
};

}  // namespace tensorizer
