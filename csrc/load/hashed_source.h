// A source over another one that computes the SHA-256 of the whole file from the bytes that pass by
// on their way to a load: nothing is read a second time. Internally locked; close() and finish() by
// the owner.
//
// One stream of SHA-256 takes the bytes in their order. A load tells which stretches it is going to
// read (expect()); a thread that has read one waits until it is its turn, hashes it and returns.
// Bytes that no load reads (gaps, tensors that nobody wants) are read by the thread whose turn it
// is, or by finish(). Threads cannot lock each other up as long as the stretches of a load are
// taken at growing offsets (SourceTraits::ascending), and a load waits only for those that were
// planned before it.
#pragma once

#include <atomic>
#include <map>
#include <memory>

#include "core/sync.h"
#include "digest/digest.h"
#include "io/range_source.h"

namespace tensorizer::load {

class HashedSource final : public io::RangeSource {
 public:
  explicit HashedSource(std::shared_ptr<io::RangeSource> of) : of_(std::move(of)) {}

  // The digest of the file, from what was read of it and from the rest, which is read now. Throws
  // what the source throws. REQUIRES: no load of it is running; called once.
  digest::Sha256Digest finish(const std::stop_token& stop);
  // Hashed so far.
  uint64_t position() const noexcept { return told_.load(std::memory_order_relaxed); }

  const std::string& name() const noexcept override { return of_->name(); }
  std::optional<uint64_t> size() const override { return of_->size(); }
  io::SourceTraits traits() const override;
  void expect(std::span<const io::Stretch> stretches) override;
  using RangeSource::read_at;
  void read_at(uint64_t offset, std::span<const io::Buffer> buffers,
               const std::stop_token& stop) override;
  uint64_t read_up_to(uint64_t offset, io::Buffer into, const std::stop_token& stop) override;
  void begin_load(uint64_t nbytes, const std::stop_token& stop) override {
    of_->begin_load(nbytes, stop);
  }
  void end_load() noexcept override { of_->end_load(); }
  void check_unchanged() const override { of_->check_unchanged(); }
  bool drop_copy() noexcept override { return of_->drop_copy(); }
  void close() noexcept override { of_->close(); }
  uint64_t bytes_read() const noexcept override { return of_->bytes_read(); }

 private:
  class Turn;
  void hash(uint64_t offset, std::span<const io::Buffer> buffers, const std::stop_token& stop);
  void hash_gap(uint64_t begin, uint64_t end, const std::stop_token& stop);

  const std::shared_ptr<io::RangeSource> of_;
  digest::Sha256 sha256_;          // of the thread that has the turn
  std::atomic<uint64_t> told_{0};  // position_, to look at without the lock
  Mutex mutex_;
  CondVar changed_;
  uint64_t position_ GUARDED_BY(mutex_) = 0;                  // all before it is hashed
  bool taken_ GUARDED_BY(mutex_) = false;                     // some thread has the turn
  std::map<uint64_t, uint64_t> expected_ GUARDED_BY(mutex_);  // begin -> end of what comes
};

}  // namespace tensorizer::load
