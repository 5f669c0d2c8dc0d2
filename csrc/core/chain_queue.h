// Work that must happen in order within a chain and in any order between chains: SHA-256 over the
// pieces of several tensors. Knows nothing about what a step does. Internally locked.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stop_token>
#include <vector>

#include "core/sync.h"

namespace tensorizer {

class ChainQueue {
 public:
  struct Step {
    uint32_t chain;
    uint32_t step;
  };
  struct Work {
    Step steps[2];
    int count = 0;  // 0, 1 or 2
  };

  // `lengths[c]` steps in chain c, all of them still to be marked ready.
  explicit ChainQueue(std::vector<uint32_t> lengths);

  // The input of this step is in place. Each step is marked once.
  void mark_ready(Step step);

  // Two steps of different chains whose turn it is, if there are; at most one if there are not and
  // `single` is set. Whoever takes a step owns its chain until done().
  Work take(bool single);

  // Blocks until a step can be taken, all are done, or the stop: count 0 says "nothing left".
  // REQUIRES: every step is or will be marked ready by somebody else.
  Work take_or_wait(const std::stop_token& stop);

  void done(const Work& work);

 private:
  struct Chain {
    uint32_t length = 0;
    uint32_t next = 0;    // first step not done
    bool taken = false;   // some thread works on `next`
    bool queued = false;  // is in runnable_
    std::vector<bool> ready;
  };
  bool can_run(const Chain& chain) const REQUIRES_LOCK(mutex_) {
    return !chain.taken && !chain.queued && chain.next < chain.length && chain.ready[chain.next];
  }
  void queue_if_runnable(uint32_t index) REQUIRES_LOCK(mutex_);
  Work pop(bool single) REQUIRES_LOCK(mutex_);

  Mutex mutex_;
  CondVar changed_;
  std::vector<Chain> chains_ GUARDED_BY(mutex_);
  std::vector<uint32_t> runnable_
      GUARDED_BY(mutex_);  // chains whose next step may run, oldest first
  uint64_t steps_left_ GUARDED_BY(mutex_) = 0;
};

}  // namespace tensorizer
