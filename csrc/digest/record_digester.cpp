#include "digest/record_digester.h"

#include <algorithm>

#include "core/checked_math.h"
#include "core/error.h"

namespace tensorizer::digest {

namespace {

// Bytes that stay gather up to so many steps before any of a few long records are hashed: a load
// that waits for its source must not have all of that left to do at its end.
constexpr uint64_t kGatheredSteps = 32;
// A record of a third of the steps that each thread has left, or more, would end last if it were
// hashed among many: one of many messages side by side advances at a fraction of the speed of one
// of two.
constexpr uint64_t kLongRecord = 3;

}  // namespace

// A record that comes in steps. `start` is written before `expected`, and then by the thread that
// has taken the next step; crcs[i] by the thread that adds step i, before its bytes are listed.
struct RecordDigester::Chain {
  explicit Chain(uint32_t steps) : crcs(steps), bytes(steps), here(steps) {}

  uint32_t steps() const noexcept { return static_cast<uint32_t>(crcs.size()); }
  bool wants_crc32() const noexcept {
    return !expected.load(std::memory_order_acquire) || start.wanted.crc32;
  }

  RecordStart start;
  std::atomic<bool> expected{false};
  std::vector<uint32_t> crcs;
  // Guarded by the digester's mutex:
  std::vector<std::span<const std::byte>> bytes;
  std::vector<bool> here;
  uint32_t next = 0;   // first step not hashed
  bool taken = false;  // queued, or some thread hashes `next`
};

RecordDigester::RecordDigester(std::span<const uint32_t> steps, Use use, Completed completed)
    : use_(use), completed_(std::move(completed)), chains_(steps.size()) {
  MutexLock lock(mutex_);
  for (size_t record = 0; record < steps.size(); ++record) {
    if (steps[record] == 0) continue;
    chains_[record] = std::make_unique<Chain>(steps[record]);
    steps_left_ += steps[record];
  }
}

RecordDigester::~RecordDigester() = default;

void RecordDigester::add_whole(std::span<Whole> records) {
  std::vector<Sha256::Update> updates;
  updates.reserve(records.size());
  for (Whole& one : records) {
    if (one.start.wanted.sha256) updates.push_back({&one.start.header.sha256, one.bytes});
  }
  Sha256::update_all(updates);
  for (Whole& one : records) {
    RecordDigests digests;
    if (one.start.wanted.crc32) digests.crc32 = crc32(one.start.header.crc32, one.bytes);
    if (one.start.wanted.sha256) digests.sha256 = one.start.header.sha256.finish();
    completed_(one.record, digests);
  }
}

void RecordDigester::expect(uint32_t record, const RecordStart& start) {
  Chain& chain = *chains_[record];
  chain.start = start;
  chain.expected.store(true, std::memory_order_release);
}

void RecordDigester::add(uint32_t record, uint32_t step, std::span<const std::byte> bytes) {
  Chain& chain = *chains_[record];
  if (chain.wants_crc32()) chain.crcs[step] = crc32(0, bytes);
  MutexLock lock(mutex_);
  chain.bytes[step] = bytes;
  chain.here[step] = true;
  here_count_.fetch_add(1, std::memory_order_relaxed);
  queue_if_ready(record, chain);
}

void RecordDigester::queue_if_ready(uint32_t record, Chain& chain) {
  if (abandoned_ || chain.taken || chain.next == chain.steps() || !chain.here[chain.next]) return;
  chain.taken = true;
  ready_.push_back(record);
  ready_count_.store(ready_.size(), std::memory_order_relaxed);
  changed_.notify_one();
}

RecordDigester::Work RecordDigester::take(size_t most) {
  Work work;
  const size_t fitting = std::min({Sha256::at_once(most), ready_.size(), kMostAtOnce});
  const size_t count = bring_long_record_first() ? std::min<size_t>(fitting, 2) : fitting;
  while (work.count < count) {
    const uint32_t record = ready_.front();
    ready_.pop_front();
    Chain& chain = *chains_[record];
    work.steps[work.count++] = {record, &chain, chain.next};
  }
  in_hand_ += count;
  here_count_.fetch_sub(count, std::memory_order_relaxed);
  ready_count_.store(ready_.size(), std::memory_order_relaxed);
  return work;
}

// If one of the ready records is long, the longest two become the first. False: none is.
bool RecordDigester::bring_long_record_first() {
  const auto left = [this](uint32_t record) {
    const Chain& chain = *chains_[record];
    return uint64_t{chain.steps()} - chain.next;
  };
  if (ready_.empty()) return false;
  const auto longest = std::ranges::max_element(ready_, {}, left);
  if (left(*longest) * kLongRecord * use_.workers < steps_left_) return false;
  std::iter_swap(ready_.begin(), longest);
  if (ready_.size() > 2)
    std::iter_swap(ready_.begin() + 1,
                   std::ranges::max_element(ready_.begin() + 1, ready_.end(), {}, left));
  return true;
}

// Leaves as much to each of the other threads, which have nothing else to do.
RecordDigester::Work RecordDigester::take_share() {
  const size_t share = ceil_div(ready_.size() + in_hand_, use_.workers);
  return take(std::min(std::max<size_t>(share, 2), ready_.size()));
}

void RecordDigester::hash(const Work& work) {
  try {
    hash_and_complete(work);
  } catch (...) {
    MutexLock lock(mutex_);
    in_hand_ -= work.count;
    changed_.notify_all();
    throw;
  }
  MutexLock lock(mutex_);
  in_hand_ -= work.count;
  for (size_t i = 0; i < work.count; ++i) {
    Chain& chain = *work.steps[i].chain;
    ++chain.next;
    chain.taken = false;
    --steps_left_;
    queue_if_ready(work.steps[i].record, chain);
  }
  changed_.notify_all();  // wakes threads that wait for one of these steps, or for all
}

void RecordDigester::hash_and_complete(const Work& work) {
  Sha256::Update updates[kMostAtOnce];
  size_t count = 0;
  {
    MutexLock lock(mutex_);
    for (size_t i = 0; i < work.count; ++i) {
      Chain& chain = *work.steps[i].chain;
      if (chain.start.wanted.sha256)
        updates[count++] = {&chain.start.header.sha256, chain.bytes[work.steps[i].step]};
    }
  }
  Sha256::update_all({updates, count});
  for (size_t i = 0; i < work.count; ++i) {
    const Step& step = work.steps[i];
    if (step.step + 1 == step.chain->steps()) complete(step.record, *step.chain);
  }
}

void RecordDigester::complete(uint32_t record, Chain& chain) {
  RecordDigests digests;
  if (chain.start.wanted.crc32) {
    digests.crc32 = chain.start.header.crc32;
    MutexLock lock(mutex_);
    for (uint32_t step = 0; step < chain.steps(); ++step)
      digests.crc32 = crc32_combine(digests.crc32, chain.crcs[step], chain.bytes[step].size());
  }
  if (chain.start.wanted.sha256) digests.sha256 = chain.start.header.sha256.finish();
  completed_(record, digests);
}

void RecordDigester::wait(uint32_t record, uint32_t step, const std::stop_token& stop) {
  Chain& chain = *chains_[record];
  if (chain.expected.load(std::memory_order_acquire) && !chain.start.wanted.sha256) return;
  hash_until([&] { return chain.next > step; }, stop);
}

template <class Predicate>
void RecordDigester::hash_until(Predicate done, const std::stop_token& stop) {
  for (;;) {
    Work work;
    {
      MutexLock lock(mutex_);
      const bool decided = changed_.wait(
          mutex_, stop, [&]() REQUIRES_LOCK(mutex_) { return done() || !ready_.empty(); });
      if (!decided) throw Error(Errc::cancelled, "cancelled");
      if (done()) return;
      work = take_share();
    }
    hash(work);
  }
}

bool RecordDigester::may_help(size_t ready, uint64_t here) const noexcept {
  if (!use_.bytes_stay) return ready >= use_.gathered;
  return ready >= 2 && (ready >= Sha256::lanes() || here >= kGatheredSteps);
}

bool RecordDigester::help() {
  if (!may_help(ready_count_.load(std::memory_order_relaxed),
                here_count_.load(std::memory_order_relaxed)))
    return false;
  Work work;
  {
    MutexLock lock(mutex_);
    if (!may_help(ready_.size(), here_count_.load(std::memory_order_relaxed))) return false;
    // Where bytes must leave, the others wait for that too.
    work = use_.bytes_stay ? take(ready_.size()) : take_share();
  }
  hash(work);
  return true;
}

bool RecordDigester::help_with(size_t least) {
  Work work;
  {
    MutexLock lock(mutex_);
    if (ready_.size() < least) return false;
    work = take_share();
  }
  hash(work);
  return true;
}

bool RecordDigester::is_idle() {
  MutexLock lock(mutex_);
  return ready_.empty() && in_hand_ == 0;
}

void RecordDigester::finish(const std::stop_token& stop) {
  hash_until([this]() REQUIRES_LOCK(mutex_) { return steps_left_ == 0; }, stop);
}

void RecordDigester::abandon() noexcept {
  MutexLock lock(mutex_);
  abandoned_ = true;
  ready_.clear();
  ready_count_.store(0, std::memory_order_relaxed);
  changed_.wait(mutex_, {}, [this]() REQUIRES_LOCK(mutex_) { return in_hand_ == 0; });
}

void StepsInBuffers::release_oldest(const std::stop_token& stop) {
  if (buffers_.empty()) return;
  for (const Step& step : buffers_.front()) digester_->wait(step.record, step.step, stop);
  buffers_.pop_front();
}

}  // namespace tensorizer::digest
