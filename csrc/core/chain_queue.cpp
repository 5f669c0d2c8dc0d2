#include "core/chain_queue.h"

#include "core/error.h"

namespace tensorizer {

ChainQueue::ChainQueue(std::vector<uint32_t> lengths) {
  MutexLock lock(mutex_);
  chains_.resize(lengths.size());
  for (size_t i = 0; i < lengths.size(); ++i) {
    chains_[i].length = lengths[i];
    chains_[i].ready.assign(lengths[i], false);
    steps_left_ += lengths[i];
  }
}

void ChainQueue::queue_if_runnable(uint32_t index) {
  if (!can_run(chains_[index])) return;
  chains_[index].queued = true;
  runnable_.push_back(index);
  changed_.notify_one();
}

void ChainQueue::mark_ready(Step step) {
  MutexLock lock(mutex_);
  chains_[step.chain].ready[step.step] = true;
  queue_if_runnable(step.chain);
}

ChainQueue::Work ChainQueue::pop(bool single) {
  Work work;
  if (runnable_.size() < (single ? 1U : 2U)) return work;
  while (work.count < 2 && !runnable_.empty()) {
    const uint32_t index = runnable_.front();
    runnable_.erase(runnable_.begin());
    Chain& chain = chains_[index];
    chain.queued = false;
    chain.taken = true;
    work.steps[work.count++] = {index, chain.next};
  }
  return work;
}

ChainQueue::Work ChainQueue::take(bool single) {
  MutexLock lock(mutex_);
  return pop(single);
}

ChainQueue::Work ChainQueue::take_or_wait(const std::stop_token& stop) {
  MutexLock lock(mutex_);
  const bool decided = changed_.wait(mutex_, stop, [this]() REQUIRES_LOCK(mutex_) {
    return steps_left_ == 0 || !runnable_.empty();
  });
  if (!decided) throw Error(Errc::cancelled, "cancelled");
  return pop(true);
}

void ChainQueue::done(const Work& work) {
  MutexLock lock(mutex_);
  for (int i = 0; i < work.count; ++i) {
    Chain& chain = chains_[work.steps[i].chain];
    chain.taken = false;
    ++chain.next;
    --steps_left_;
    queue_if_runnable(work.steps[i].chain);
  }
  if (steps_left_ == 0) changed_.notify_all();
}

}  // namespace tensorizer
