#include "load/hashed_source.h"

#include <algorithm>
#include <vector>

namespace tensorizer::load {
namespace {

constexpr uint64_t kGapNbytes = uint64_t{32} << 20;  // of gaps, so much is in memory at a time

}  // namespace

// The right to hash the bytes that come next, until it is destroyed.
class HashedSource::Turn {
 public:
  // Of the bytes [begin, end), which were read. Throws Error(cancelled).
  Turn(HashedSource& source, uint64_t begin, uint64_t end, const std::stop_token& stop)
      : source_(source), end_(end) {
    MutexLock lock(source_.mutex_);
    const auto at = source_.expected_.find(begin);
    if (at != source_.expected_.end() && at->second == end) {
      const auto is_turn = [&]() REQUIRES_LOCK(source_.mutex_) {
        return source_.position_ >= end ||
               (!source_.taken_ && source_.expected_.begin()->first == begin);
      };
      if (!source_.changed_.wait(source_.mutex_, stop, is_turn))
        throw Error(Errc::cancelled, "cancelled");
    } else if (source_.taken_ || source_.position_ < begin) {
      return;  // it comes again, with the load that was planned, or with finish()
    }
    if (source_.position_ >= end) return;
    source_.taken_ = has_it_ = true;
    position_ = source_.position_;
  }
  ~Turn() {
    if (!has_it_) return;
    MutexLock lock(source_.mutex_);
    source_.taken_ = false;
    if (is_done_) {
      source_.position_ = end_;
      source_.told_.store(end_, std::memory_order_relaxed);
      auto& expected = source_.expected_;
      while (!expected.empty() && expected.begin()->second <= end_)
        expected.erase(expected.begin());
    }
    source_.changed_.notify_all();
  }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

  bool has_it() const noexcept { return has_it_; }
  uint64_t position() const noexcept { return position_; }  // up to where others have hashed
  void done() noexcept { is_done_ = true; }

 private:
  HashedSource& source_;
  const uint64_t end_;
  uint64_t position_ = 0;
  bool has_it_ = false, is_done_ = false;
};

io::SourceTraits HashedSource::traits() const {
  io::SourceTraits traits = of_->traits();
  traits.streams = 1;
  traits.ascending = true;
  return traits;
}

void HashedSource::expect(std::span<const io::Stretch> stretches) {
  MutexLock lock(mutex_);
  for (const io::Stretch& stretch : stretches) {
    const uint64_t end = stretch.offset + stretch.nbytes;
    if (end <= position_) continue;
    uint64_t& noted = expected_[stretch.offset];
    noted = std::max(noted, end);
  }
}

void HashedSource::read_at(uint64_t offset, std::span<const io::Buffer> buffers,
                           const std::stop_token& stop) {
  of_->read_at(offset, buffers, stop);
  hash(offset, buffers, stop);
}

uint64_t HashedSource::read_up_to(uint64_t offset, io::Buffer into, const std::stop_token& stop) {
  const uint64_t nbytes = of_->read_up_to(offset, into, stop);
  const io::Buffer got = into.first(static_cast<size_t>(nbytes));
  hash(offset, {&got, 1}, stop);
  return nbytes;
}

void HashedSource::hash(uint64_t offset, std::span<const io::Buffer> buffers,
                        const std::stop_token& stop) {
  Turn turn(*this, offset, offset + io::total_nbytes(buffers), stop);
  if (!turn.has_it()) return;
  if (turn.position() < offset) hash_gap(turn.position(), offset, stop);
  uint64_t known = turn.position() > offset ? turn.position() - offset : 0;
  for (const io::Buffer& one : buffers) {
    const uint64_t skipped = std::min<uint64_t>(known, one.size());
    known -= skipped;
    sha256_.update(one.subspan(static_cast<size_t>(skipped)));
  }
  turn.done();
}

void HashedSource::hash_gap(uint64_t begin, uint64_t end, const std::stop_token& stop) {
  std::vector<std::byte> memory(static_cast<size_t>(std::min(kGapNbytes, end - begin)));
  while (begin < end) {
    const io::Buffer into = io::Buffer(memory).first(
        static_cast<size_t>(std::min<uint64_t>(memory.size(), end - begin)));
    io::read_parallel(*of_, begin, into, stop);
    sha256_.update(into);
    begin += into.size();
  }
}

digest::Sha256Digest HashedSource::finish(const std::stop_token& stop) {
  uint64_t position = 0;
  {
    MutexLock lock(mutex_);
    position = position_;
  }
  if (const std::optional<uint64_t> end = of_->size()) {
    hash_gap(position, std::max(position, *end), stop);
  } else {
    std::vector<std::byte> buffer(static_cast<size_t>(kGapNbytes));
    for (uint64_t got = buffer.size(); got == buffer.size(); position += got) {
      got = of_->read_up_to(position, io::Buffer(buffer), stop);
      sha256_.update(io::Buffer(buffer).first(static_cast<size_t>(got)));
    }
  }
  of_->check_unchanged();
  return sha256_.finish();
}

}  // namespace tensorizer::load
