// Lets threads that took numbered work do one part of it in the order of the numbers.
#pragma once

#include <cstdint>
#include <stop_token>

#include "core/error.h"
#include "core/sync.h"

namespace tensorizer {

class Turns {
 public:
  // From the moment when every number before `number` has passed until it is destroyed. Throws
  // Error(cancelled). REQUIRES: threads that took earlier numbers wait for nothing of this thread.
  class Turn {
   public:
    Turn(Turns& turns, uint64_t number, const std::stop_token& stop) : turns_(turns) {
      MutexLock lock(turns_.mutex_);
      if (!turns_.changed_.wait(turns_.mutex_, stop, [&]() REQUIRES_LOCK(turns_.mutex_) {
            return turns_.next_ == number;
          }))
        throw Error(Errc::cancelled, "cancelled");
    }
    ~Turn() {
      MutexLock lock(turns_.mutex_);
      ++turns_.next_;
      turns_.changed_.notify_all();
    }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

   private:
    Turns& turns_;
  };

 private:
  Mutex mutex_;
  CondVar changed_;
  uint64_t next_ GUARDED_BY(mutex_) = 0;
};

}  // namespace tensorizer
