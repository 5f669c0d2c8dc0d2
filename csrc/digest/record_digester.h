// The digests of many records at once: which bytes come next, as many SHA-256 streams side by side
// as the processor takes, CRCs of parts combined. For loads, which compare the result, and saves,
// which store it. Internally locked; every method may be called by any number of threads.
//
// A record's payload comes in steps, numbered from 0, in any order and from any thread. Its CRC32
// is made of parts, each by the thread that brings it. Its SHA-256 runs over the steps in order: a
// step is hashed, by whichever thread looks for work next, once those before it are done.
//
// A step may be added long before it is hashed, so its bytes have to stay where they are:
//   - bytes that outlive the session (a tensor's own memory) need nothing more;
//   - before a thread fills a buffer again it calls wait() for each step in it. wait() hashes other
//     steps meanwhile. Threads cannot lock each other up as long as all of them take steps in one
//     order, and a thread that has taken a step waits only for steps before it.
// A record that comes whole needs no state here: add_whole() ends it at once.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <stop_token>
#include <vector>

#include "core/sync.h"
#include "digest/digest.h"

namespace tensorizer::digest {

// The digests of a record's header, and the kinds of hashes that are wanted.
struct RecordStart {
  HeaderDigest header;
  HashChoice wanted;
};

// Complete; a kind that was not wanted is zero.
struct RecordDigests {
  uint32_t crc32 = 0;
  Sha256Digest sha256{};
};

class RecordDigester {
 public:
  // Called once per record, by the thread that hashed the last of it, without a lock. Its
  // exceptions leave the method that was called; the record then stays unfinished.
  using Completed = std::function<void(uint32_t record, const RecordDigests& digests)>;

  // How the threads of one session use a digester.
  struct Use {
    unsigned workers = 1;
    // Bytes need not leave soon: help() lets steps gather, for more streams side by side.
    bool bytes_stay = false;
    // If they have to leave: help() hashes once so many records have a step. A thread that waits
    // for a buffer hashes the steps that are there.
    size_t gathered = 2;
  };

  // steps[r]: how many steps record r comes in; 0: it comes whole, through add_whole().
  RecordDigester(std::span<const uint32_t> steps, Use use, Completed completed);
  ~RecordDigester();

  struct Whole {
    uint32_t record;
    RecordStart start;
    std::span<const std::byte> bytes;
  };
  // Digests records that are complete here and now, side by side.
  void add_whole(std::span<Whole> records);

  // Once per record that comes in steps, before its step 0 is added.
  void expect(uint32_t record, const RecordStart& start);

  // The bytes of a step; each comes once. They stay until the record is completed or wait() has
  // returned for this step.
  void add(uint32_t record, uint32_t step, std::span<const std::byte> bytes);

  // Returns when the bytes of this step are no longer needed; digests other steps until then.
  // Throws Error(cancelled). REQUIRES: the steps before it were added, or will be, by threads that
  // do not wait for this one.
  void wait(uint32_t record, uint32_t step, const std::stop_token& stop);

  // Digests one step each of as many records as pay, of two at least: between other work, before
  // the bytes leave the cache. False: nothing was done.
  bool help();

  // As help(), as soon as `least` records have a step, 1 or more: for a thread that would wait.
  bool help_with(size_t least);

  // Whether all steps that have come are digested, but for those behind one that is missing.
  bool is_idle();

  // Returns when no thread reads the bytes of any step, now or later: steps that were not hashed
  // stay so. For a worker that fails while its buffers hold steps; the others are about to stop.
  void abandon() noexcept;

  // Returns when all steps have been digested, by this thread too. Throws Error(cancelled).
  // REQUIRES: they were added, or will be, by others.
  void finish(const std::stop_token& stop);

 private:
  static constexpr size_t kMostAtOnce = 16;
  struct Chain;
  struct Step {
    uint32_t record;
    Chain* chain;
    uint32_t step;
  };
  struct Work {
    Step steps[kMostAtOnce]{};
    size_t count = 0;
  };

  bool may_help(size_t ready, uint64_t here) const noexcept;
  Work take(size_t most) REQUIRES_LOCK(mutex_);
  bool bring_long_record_first() REQUIRES_LOCK(mutex_);
  Work take_share() REQUIRES_LOCK(mutex_);
  void queue_if_ready(uint32_t record, Chain& chain) REQUIRES_LOCK(mutex_);
  // Digests steps until done(), which is called under the lock. Throws Error(cancelled).
  template <class Predicate>
  void hash_until(Predicate done, const std::stop_token& stop);
  void hash(const Work& work);
  void hash_and_complete(const Work& work);
  void complete(uint32_t record, Chain& chain);

  const Use use_;
  const Completed completed_;
  std::vector<std::unique_ptr<Chain>> chains_;  // per record; null for those that come whole
  std::atomic<size_t> ready_count_{0};          // ready_.size(), to look at without the lock
  std::atomic<uint64_t> here_count_{0};         // steps that were added and not yet taken
  Mutex mutex_;
  CondVar changed_;
  std::deque<uint32_t> ready_ GUARDED_BY(mutex_);  // records whose next step is here, oldest first
  size_t in_hand_ GUARDED_BY(mutex_) = 0;          // records of which a step is being hashed
  bool abandoned_ GUARDED_BY(mutex_) = false;
  uint64_t steps_left_ GUARDED_BY(mutex_) = 0;
};

// The steps whose bytes lie in the buffers that one worker has under way. Confined to one thread.
// Made after the buffers and so destroyed before them: when a worker ends early, its buffers stay
// until no other worker hashes from them.
class StepsInBuffers {
 public:
  struct Step {
    uint32_t record, step;
  };

  // Without a digester nothing is hashed, and no buffer is begun.
  explicit StepsInBuffers(RecordDigester* digester) : digester_(digester) {}
  ~StepsInBuffers() {
    if (!buffers_.empty()) digester_->abandon();
  }
  StepsInBuffers(const StepsInBuffers&) = delete;
  StepsInBuffers& operator=(const StepsInBuffers&) = delete;

  size_t buffers() const noexcept { return buffers_.size(); }
  void begin_buffer() { buffers_.emplace_back(); }
  // The buffer that was begun last, to which no step was added.
  void drop_newest() { buffers_.pop_back(); }
  // In the buffer that was begun last; the digester has it.
  void add(Step step) { buffers_.back().push_back(step); }
  // Returns when the bytes of the oldest buffer are no longer needed; at once if there is no
  // buffer. Throws Error(cancelled). See RecordDigester::wait().
  void release_oldest(const std::stop_token& stop);

 private:
  RecordDigester* const digester_;
  std::deque<std::vector<Step>> buffers_;  // oldest first
};

}  // namespace tensorizer::digest
