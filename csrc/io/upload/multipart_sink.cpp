#include "io/upload/multipart_sink.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <system_error>

#include "core/checked_math.h"
#include "core/error.h"

namespace tensorizer::io {
namespace {

constexpr uint64_t kFlatParts = 6'000;
constexpr uint64_t kMiB = uint64_t{1} << 20;
// A write call ends with a mark of a few bytes that the next call overwrites. So neither the last
// bytes of the call in progress nor those of the one published before it are final: parts that hold
// some of them have to wait.
constexpr uint64_t kTailNbytes = uint64_t{64} << 10;
// Objects of this many parts of the smallest size and below get that size.
constexpr uint64_t kFewParts = 256;
// Uploads that end wake the threads that wait for room; whether waiting is for nothing they look
// themselves.
constexpr std::chrono::milliseconds kPatience{20};

Error aborted(const std::string& name, const std::string& reason) {
  return Error(Errc::io, "Failed to write " + name + ": " + reason + "; nothing was stored", name);
}

}  // namespace

PartSizes::PartSizes(uint64_t expected_nbytes, uint64_t min_part_nbytes,
                     uint64_t max_part_nbytes) noexcept {
  if (expected_nbytes > kFlatParts * max_part_nbytes)
    flat_nbytes_ = align_up(ceil_div(expected_nbytes, kFlatParts), kMiB);
  else
    flat_nbytes_ = std::clamp(align_up(ceil_div(expected_nbytes, kFewParts), kMiB), min_part_nbytes,
                              max_part_nbytes);
  // The sum of growth * 1, growth * 2, ... over the parts behind the flat ones makes up for what is
  // missing.
  constexpr uint64_t kGrowing = kMaxParts - kFlatParts;
  const uint64_t flat_total = flat_nbytes_ * kMaxParts;
  const uint64_t missing = kMaxObjectNbytes > flat_total ? kMaxObjectNbytes - flat_total : 0;
  growth_nbytes_ = ceil_div(missing, kGrowing * (kGrowing + 1) / 2);
}

uint64_t PartSizes::nbytes(uint64_t index) const noexcept {
  if (index < kFlatParts) return flat_nbytes_;
  return flat_nbytes_ + growth_nbytes_ * (index - kFlatParts + 1);
}

MultipartSink::MultipartSink(std::unique_ptr<MultipartTransport> transport, std::string name,
                             const MultipartOptions& options)
    : transport_(std::move(transport)), name_(std::move(name)), options_(options) {}

MultipartSink::~MultipartSink() { abandon(); }

bool MultipartSink::has_content() const {
  MutexLock lock(mutex_);
  return published_ > 0 && !error_;
}

uint64_t MultipartSink::peak_nbytes() const {
  MutexLock lock(mutex_);
  return peak_;
}

PartSizes MultipartSink::part_sizes() const {
  return sizes_ ? *sizes_ : PartSizes(extent_, options_.min_part_nbytes, options_.max_part_nbytes);
}

uint64_t MultipartSink::budget_nbytes() const {
  if (options_.budget_nbytes) return options_.budget_nbytes;
  // One is filled and one kept for the head while all the others are on their way.
  return (std::max(1u, options_.uploads) + uint64_t{2}) * part_sizes().nbytes(0);
}

unsigned MultipartSink::places() const {
  MutexLock lock(mutex_);
  return static_cast<unsigned>(
      std::clamp<uint64_t>(budget_nbytes() / part_sizes().nbytes(0), 1, kMaxParts));
}

// Beside the parts of the head behind the first, which stay until the end.
bool MultipartSink::fits(uint64_t nbytes) const {
  const uint64_t part = part_sizes().nbytes(0);
  return in_memory_ + nbytes <= budget_nbytes() + (align_up(head_end_, part) - part);
}

void MultipartSink::reserve_head(uint64_t end) {
  MutexLock lock(mutex_);
  head_end_ = std::max(head_end_, end);
}

void MultipartSink::reserve(uint64_t end) {
  {
    MutexLock lock(mutex_);
    throw_if_failed();
    if (end > kMaxObjectNbytes)
      throw aborted(name_, "it would have " + std::to_string(end) +
                               " bytes, an object holds up to " + std::to_string(kMaxObjectNbytes));
    extent_ = std::max(extent_, end);
    for (size_t i = 0; i < parts_.size(); ++i) queue_if_due(i);
  }
  send_queued();
}

size_t MultipartSink::part_at(uint64_t offset) {
  if (!sizes_) sizes_ = part_sizes();
  while (parts_.empty() || parts_.back().end() <= offset) {
    if (parts_.size() == kMaxParts)
      throw aborted(name_, "an upload has 10,000 parts at most, and they are full");
    Part& part = parts_.emplace_back();
    part.begin = parts_.size() == 1 ? 0 : parts_[parts_.size() - 2].end();
    part.nbytes = sizes_->nbytes(parts_.size() - 1);
  }
  const auto after =
      std::upper_bound(parts_.begin(), parts_.end(), offset,
                       [](uint64_t position, const Part& part) { return position < part.begin; });
  return static_cast<size_t>(after - parts_.begin()) - 1;
}

bool MultipartSink::lacks_memory(const Part& part) const {
  return part.state == Part::State::filling && !part.bytes;
}

void MultipartSink::allocate(Part& part) {
  part.bytes = allocate_pages(part.nbytes);
  in_memory_ += part.nbytes;
  peak_ = std::max(peak_, in_memory_);
}

// All of the parts [first, last], or nothing.
bool MultipartSink::try_room(size_t first, size_t last) {
  uint64_t wanted = 0;
  for (size_t i = first; i <= last; ++i)
    if (lacks_memory(parts_[i])) wanted += parts_[i].nbytes;
  if (wanted > 0 && !fits(wanted)) return false;
  for (size_t i = first; i <= last; ++i)
    if (lacks_memory(parts_[i])) allocate(parts_[i]);
  return true;
}

bool MultipartSink::make_room(uint64_t begin, uint64_t end, RoomWish wish) {
  if (begin >= end) return true;
  MutexLock lock(mutex_);
  throw_if_failed();
  const size_t last = part_at(end - 1);
  const size_t first = part_at(begin);
  if (try_room(first, last)) return true;
  if (wish == RoomWish::now) return false;
  const auto until = std::chrono::steady_clock::now() + kPatience;
  const bool made = changed_.wait_until(
      mutex_, {}, until, [&]() REQUIRES_LOCK(mutex_) { return error_ || try_room(first, last); });
  throw_if_failed();
  if (made) return true;
  if (wish == RoomWish::soon || pending_ > 0) return false;
  for (size_t i = first; i <= last; ++i) {
    if (!lacks_memory(parts_[i])) continue;
    allocate(parts_[i]);  // the others once this one is on its way
    break;
  }
  return true;
}

// Room for up to `nbytes` at `offset`, in the part that holds it; leave_part() gives it back.
MultipartSink::Room MultipartSink::enter_part(uint64_t offset, uint64_t nbytes,
                                              const std::stop_token& stop) {
  MutexLock lock(mutex_);
  throw_if_failed();
  const size_t index = part_at(offset);
  Part& part = parts_[index];
  if (lacks_memory(part)) {
    // While uploads are running, one of them will make room. Without any, waiting would be for
    // nothing.
    const bool ready = changed_.wait(mutex_, stop, [&]() REQUIRES_LOCK(mutex_) {
      return error_ || part.bytes || pending_ == 0 || fits(part.nbytes);
    });
    if (!ready) throw Error(Errc::cancelled, "cancelled");
    throw_if_failed();
  }
  if (part.state != Part::State::filling)
    throw aborted(name_, "byte " + std::to_string(offset) + " was written after its part was sent");
  if (!part.bytes) allocate(part);
  ++part.writers;
  dirty_ = true;
  const uint64_t n = std::min(nbytes, part.end() - offset);
  return {index, Buffer(part.bytes.get() + (offset - part.begin), n)};
}

void MultipartSink::leave_part(size_t index, uint64_t begin, uint64_t end) {
  MutexLock lock(mutex_);
  Part& part = parts_[index];
  --part.writers;
  part.written.add(begin, end);
  extent_ = std::max(extent_, end);
  queue_if_due(index);
}

void MultipartSink::write_at(uint64_t offset, std::span<const ConstBuffer> buffers,
                             const std::stop_token& stop) {
  for (ConstBuffer from : buffers) {
    while (!from.empty()) {
      throw_if_stopped(stop);
      const Room room = enter_part(offset, from.size(), stop);
      const size_t n = room.bytes.size();
      std::memcpy(room.bytes.data(), from.data(), n);
      leave_part(room.index, offset, offset + n);
      send_queued();
      offset += n;
      from = from.subspan(n);
    }
  }
}

bool MultipartSink::fill_at(uint64_t offset, uint64_t nbytes,
                            const std::function<void(Buffer)>& fill, const std::stop_token& stop) {
  {
    MutexLock lock(mutex_);
    throw_if_failed();
    if (offset + nbytes > parts_[part_at(offset)].end()) return false;
  }
  const Room room = enter_part(offset, nbytes, stop);
  fill(room.bytes);
  leave_part(room.index, offset, offset + nbytes);
  send_queued();
  return true;
}

// Whole, and final: not of the head, not at the tail of this or the last call.
bool MultipartSink::is_due(size_t index) const {
  const Part& part = parts_[index];
  return part.state == Part::State::filling && part.writers == 0 && part.bytes &&
         part.begin >= head_end_ && part.end() + kTailNbytes <= extent_ &&
         (part.begin >= published_ || part.end() + kTailNbytes <= published_) &&
         part.written.contains(part.begin, part.end());
}

void MultipartSink::queue_if_due(size_t index) {
  if (!error_ && is_due(index)) queue(index);
}

void MultipartSink::queue(size_t index) {
  parts_[index].state = Part::State::queued;
  queue_.push_back(index);
  ++pending_;
  if (idle_ < queue_.size() && jobs_.size() < std::max(1u, options_.uploads)) {
    jobs_.emplace_back();
    try {
      jobs_.back() = ProcessPool::instance().start([this] { run_uploads(); });
      ++running_;
    } catch (const std::system_error&) {  // no more threads: those there are, or the writer
      jobs_.pop_back();
    }
  }
  changed_.notify_all();
}

void MultipartSink::free_part(Part& part) {
  if (part.bytes) in_memory_ -= part.nbytes;
  part.bytes.reset();
}

// One job of the upload. The last one to leave a failed upload aborts it: no part is on its way any
// more then.
void MultipartSink::run_uploads() noexcept {
  while (true) {
    size_t index = 0;
    {
      MutexLock lock(mutex_);
      ++idle_;
      changed_.wait(mutex_, {},
                    [&]() REQUIRES_LOCK(mutex_) { return error_ || closing_ || !queue_.empty(); });
      --idle_;
      if (error_ || queue_.empty()) break;
      index = queue_.front();
      queue_.pop_front();
    }
    upload_or_fail(index);
  }
  {
    MutexLock lock(mutex_);
    --running_;
  }
  abort_after_the_last();
}

void MultipartSink::upload_or_fail(size_t index) noexcept {
  try {
    wait_until_created();
    upload(index);
  } catch (...) {
    fail(std::current_exception());
  }
}

// Behind every queue(), by the same thread and without the lock.
void MultipartSink::send_queued() noexcept {
  create_once();
  upload_here();
}

// Where the system has no thread to give, the writing thread uploads what is due.
void MultipartSink::upload_here() noexcept {
  for (;;) {
    size_t index = 0;
    {
      MutexLock lock(mutex_);
      if (running_ > 0 || error_ || queue_.empty()) return;
      index = queue_.front();
      queue_.pop_front();
    }
    upload_or_fail(index);
  }
}

void MultipartSink::abort_after_the_last() noexcept {
  {
    MutexLock lock(mutex_);
    if (running_ > 0 || !error_ || upload_ != Upload::created) return;
    upload_ = Upload::ended;
  }
  transport_->abort();
}

// On the thread that queued the first part: it works for a call that Ctrl-C can end, upload threads
// work for none.
void MultipartSink::create_once() noexcept {
  {
    MutexLock lock(mutex_);
    if (error_ || pending_ == 0 || upload_ != Upload::none) return;
    upload_ = Upload::creating;
  }
  std::exception_ptr error;
  try {
    transport_->create(stop_.get_token());
  } catch (const Error& e) {
    error = e.code() == Errc::cancelled
                ? std::make_exception_ptr(aborted(name_, "the call was interrupted"))
                : std::current_exception();
  } catch (...) {
    error = std::current_exception();
  }
  {
    MutexLock lock(mutex_);
    upload_ = error ? Upload::ended : Upload::created;
    changed_.notify_all();
  }
  if (error) fail(error);
  abort_after_the_last();  // where it was given up meanwhile
}

void MultipartSink::wait_until_created() {
  MutexLock lock(mutex_);
  changed_.wait(mutex_, {},
                [&]() REQUIRES_LOCK(mutex_) { return error_ || upload_ == Upload::created; });
  throw_if_failed();
}

ConstBuffer MultipartSink::bytes_of(size_t index) const {
  MutexLock lock(mutex_);
  return {parts_[index].bytes.get(), parts_[index].nbytes};
}

void MultipartSink::upload(size_t index) {
  std::string etag =
      transport_->put_part(static_cast<int>(index) + 1, bytes_of(index), stop_.get_token());
  MutexLock lock(mutex_);
  Part& part = parts_[index];
  part.etag = std::move(etag);
  part.state = Part::State::uploaded;
  free_part(part);
  --pending_;
  changed_.notify_all();
}

void MultipartSink::fail(std::exception_ptr error) noexcept {
  {
    MutexLock lock(mutex_);
    if (error_) return;
    error_ = std::move(error);
    queue_.clear();
    changed_.notify_all();
  }
  stop_.request_stop();
}

void MultipartSink::throw_if_failed() const {
  if (error_) std::rethrow_exception(error_);
}

// The index has outgrown its room. The part that holds the room's end grows, and everything behind
// moves with it: parts have numbers and no positions, so those that were sent stay as they are.
void MultipartSink::relocate(uint64_t from, uint64_t, uint64_t to, const std::stop_token&) {
  MutexLock lock(mutex_);
  throw_if_failed();
  const uint64_t shift = to - from;
  const size_t index = part_at(from - 1);
  Part& part = parts_[index];
  if (part.state != Part::State::filling || !part.bytes)
    throw aborted(name_, "bytes before " + std::to_string(from) + " were sent already");
  Pages longer = allocate_pages(part.nbytes + shift);
  const uint64_t kept = from - part.begin;
  std::memcpy(longer.get(), part.bytes.get(), kept);
  std::memcpy(longer.get() + kept + shift, part.bytes.get() + kept, part.nbytes - kept);
  part.bytes = std::move(longer);
  part.written.insert_gap(from, shift);
  part.nbytes += shift;
  for (size_t i = index + 1; i < parts_.size(); ++i) {
    parts_[i].begin += shift;
    parts_[i].written.insert_gap(0, shift);
  }
  in_memory_ += shift;
  peak_ = std::max(peak_, in_memory_);
  extent_ += shift;
  if (published_ > 0) published_ += shift;
  head_end_ += shift;
  dirty_ = true;
}

void MultipartSink::publish(uint64_t end, const std::stop_token&) {
  {
    MutexLock lock(mutex_);
    throw_if_failed();
    published_ = end;
    is_empty_ = end == 0;
    dirty_ = false;
    for (size_t i = 0; i < parts_.size(); ++i) queue_if_due(i);
  }
  send_queued();
}

// Parts that hold void bytes may be on their way, and what they replaced is gone, so there is
// nothing to go back to.
void MultipartSink::rollback(uint64_t) noexcept {
  {
    MutexLock lock(mutex_);
    if (!dirty_) return;
  }
  fail(std::make_exception_ptr(
      aborted(name_, "an earlier write failed, so the upload was aborted")));
  stop_uploads();
}

void MultipartSink::abandon() noexcept {
  if (!owner_.is_this_one()) return;
  fail(std::make_exception_ptr(aborted(name_, "the upload was given up")));
  stop_uploads();
}

void MultipartSink::stop_uploads() noexcept {
  std::vector<ProcessJob> jobs;
  {
    MutexLock lock(mutex_);
    closing_ = true;
    changed_.notify_all();
    jobs.swap(jobs_);
  }
  for (const ProcessJob& job : jobs) job.join();
  abort_after_the_last();
  MutexLock lock(mutex_);
  for (Part& part : parts_)
    if (part.writers == 0) free_part(part);
}

void MultipartSink::finish(const std::stop_token& stop) {
  try {
    size_t parts = 0;
    bool is_empty = false;
    {
      MutexLock lock(mutex_);
      if (finished_) return;
      throw_if_failed();
      is_empty = is_empty_;
      if (published_ > 0) parts = cut_parts(published_);
    }
    if (is_empty) transport_->put_object({}, stop);
    if (parts == 1) transport_->put_object(bytes_of(0), stop);
    if (parts > 1) put_rest(stop);
  } catch (...) {
    fail(std::current_exception());
    stop_uploads();
    throw;
  }
  {
    MutexLock lock(mutex_);
    finished_ = true;
  }
  fail(std::make_exception_ptr(
      Error(Errc::io, "Failed to write " + name_ + ": it is closed", name_)));
  stop_uploads();
}

// Cuts the parts at `end`, makes sure that every byte before it was written, and returns how many
// parts there are.
size_t MultipartSink::cut_parts(uint64_t end) {
  while (!parts_.empty() && parts_.back().begin >= end) {
    free_part(parts_.back());
    parts_.pop_back();
  }
  uint64_t whole = 0;  // bytes from 0 on that are there
  for (Part& part : parts_) {
    const bool sent = part.state != Part::State::filling;
    whole = sent ? part.end() : part.written.first_missing(part.begin, std::min(part.end(), end));
    if (whole < std::min(part.end(), end)) break;
  }
  if (whole < end) throw aborted(name_, "byte " + std::to_string(whole) + " was never written");
  if (whole > end) throw aborted(name_, "more was sent than there is to store");
  Part& last = parts_.back();
  in_memory_ -= last.end() - end;
  last.nbytes -= last.end() - end;
  return parts_.size();
}

void MultipartSink::put_rest(const std::stop_token& stop) {
  std::vector<std::string> etags;
  {
    MutexLock lock(mutex_);
    for (size_t i = 1; i < parts_.size(); ++i)
      if (parts_[i].state == Part::State::filling) queue(i);
    if (parts_[0].state == Part::State::filling) queue(0);
  }
  send_queued();
  {
    MutexLock lock(mutex_);
    const bool ended = changed_.wait(
        mutex_, stop, [&]() REQUIRES_LOCK(mutex_) { return error_ || pending_ == 0; });
    throw_if_failed();
    if (!ended) throw Error(Errc::cancelled, "cancelled");
    for (Part& part : parts_) etags.push_back(std::move(part.etag));
  }
  transport_->complete(etags, stop);
  MutexLock lock(mutex_);
  upload_ = Upload::ended;
}

}  // namespace tensorizer::io
