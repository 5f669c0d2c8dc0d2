// An object in an object store, written as a multipart upload: parts are put together in memory
// from writes in any order, and are uploaded in parallel, each as soon as it is whole and cannot
// change any more.
//
// Bytes [0, head) (prologue and index, see RangeSink::reserve_head) may be written again, so the
// parts they touch stay in memory and go last; relocate() makes the last of them longer and moves
// nothing that was uploaded. The object appears when finish() has completed the upload, and not at
// all otherwise: a failure anywhere, a rollback of written bytes, abandon() and the destructor
// abort it. An object that fits one part is stored with a single PUT.
//
// Memory: part buffers within MultipartOptions::budget_nbytes, plus the parts of a head that has
// several, plus whatever parts the order of writes leaves unfinished while no upload is running
// that could make room (so that no order can block). Writers that ask make_room() before each unit
// leave no more unfinished than their order does, however many they are.
//
// write_at is safe from many threads; everything else is confined to the session's thread. Uploads
// are jobs of the process, which end with the upload. After a fork the child's copy does nothing.
#pragma once

#include <deque>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/fork.h"
#include "core/pages.h"
#include "core/process_pool.h"
#include "core/sync.h"
#include "io/byte_ranges.h"
#include "io/range_sink.h"

namespace tensorizer::io {

// What the sink needs of an object store. Called from the sink's threads, create() and complete()
// from those of its callers, and never while it holds a lock; put_part by several threads at once,
// everything else by one at a time. All but abort() throw Error on failure.
class MultipartTransport {
 public:
  virtual ~MultipartTransport() = default;

  // Before the first part.
  virtual void create(const std::stop_token& stop) = 0;
  // Stores part `number`, from 1 on; returns its ETag. `bytes` is not read any more after the
  // return.
  virtual std::string put_part(int number, ConstBuffer bytes, const std::stop_token& stop) = 0;
  // Makes the object of all parts. `etags[i]` is that of part i + 1.
  virtual void complete(const std::vector<std::string>& etags, const std::stop_token& stop) = 0;
  // Ends an upload that was created and not completed.
  virtual void abort() noexcept = 0;
  // Stores the whole object at once; in place of all the above.
  virtual void put_object(ConstBuffer bytes, const std::stop_token& stop) = 0;
};

struct MultipartOptions {
  unsigned uploads = 8;        // at the same time
  uint64_t budget_nbytes = 0;  // of part buffers; 0: two parts more than uploads
  // Part sizes: the first suits objects of unknown and of moderate size, the second very large
  // ones.
  uint64_t min_part_nbytes = uint64_t{16} << 20;
  uint64_t max_part_nbytes = uint64_t{64} << 20;
};

inline constexpr uint64_t kMaxParts = 10'000;
inline constexpr uint64_t kMaxObjectNbytes = uint64_t{5} << 40;

// Sizes of the parts of one upload. Pure.
//
// An object announced with `expected_nbytes` gets parts of one size, min to max and beyond where it
// would otherwise need more than 6,000. Parts number 6,000 and up grow, evenly, so that 10,000 hold
// kMaxObjectNbytes however small the announcement was.
class PartSizes {
 public:
  PartSizes(uint64_t expected_nbytes, uint64_t min_part_nbytes, uint64_t max_part_nbytes) noexcept;

  // Of part `index`, from 0 on. REQUIRES: index < kMaxParts.
  uint64_t nbytes(uint64_t index) const noexcept;

 private:
  uint64_t flat_nbytes_;
  uint64_t growth_nbytes_;  // from one part to the next
};

class MultipartSink final : public RangeSink {
 public:
  MultipartSink(std::unique_ptr<MultipartTransport> transport, std::string name,
                const MultipartOptions& options);
  ~MultipartSink() override;

  const std::string& name() const noexcept override { return name_; }
  unsigned places() const override;
  bool make_room(uint64_t begin, uint64_t end, RoomWish wish) override;
  void reserve_head(uint64_t end) override;
  void reserve(uint64_t end) override;
  using RangeSink::write_at;
  void write_at(uint64_t offset, std::span<const ConstBuffer> buffers,
                const std::stop_token& stop) override;
  bool fill_at(uint64_t offset, uint64_t nbytes, const std::function<void(Buffer)>& fill,
               const std::stop_token& stop) override;
  void relocate(uint64_t from, uint64_t nbytes, uint64_t to, const std::stop_token& stop) override;
  void publish(uint64_t end, const std::stop_token& stop) override;
  void rollback(uint64_t end) noexcept override;
  void abandon() noexcept override;
  // Once it has returned, further calls do nothing.
  void finish(const std::stop_token& stop) override;

  // True once a call was published that no failure has made void.
  bool has_content() const;
  // True after a fork, in the child.
  bool is_of_this_process() const noexcept { return owner_.is_this_one(); }

  // For tests: the most bytes that part buffers have taken at once.
  uint64_t peak_nbytes() const;

 private:
  struct Part {
    enum class State : uint8_t { filling, queued, uploaded };
    uint64_t begin = 0;
    uint64_t nbytes = 0;
    State state = State::filling;
    unsigned writers = 0;  // copying into `bytes` right now
    Pages bytes;
    ByteRanges written;  // absolute positions
    std::string etag;
    uint64_t end() const noexcept { return begin + nbytes; }
  };

  struct Room {
    size_t index = 0;
    Buffer bytes;
  };

  PartSizes part_sizes() const REQUIRES_LOCK(mutex_);
  uint64_t budget_nbytes() const REQUIRES_LOCK(mutex_);
  bool fits(uint64_t nbytes) const REQUIRES_LOCK(mutex_);
  size_t part_at(uint64_t offset) REQUIRES_LOCK(mutex_);
  bool lacks_memory(const Part& part) const REQUIRES_LOCK(mutex_);
  bool try_room(size_t first, size_t last) REQUIRES_LOCK(mutex_);
  void allocate(Part& part) REQUIRES_LOCK(mutex_);
  Room enter_part(uint64_t offset, uint64_t nbytes, const std::stop_token& stop);
  void leave_part(size_t index, uint64_t begin, uint64_t end);
  bool is_due(size_t index) const REQUIRES_LOCK(mutex_);
  void queue_if_due(size_t index) REQUIRES_LOCK(mutex_);
  void queue(size_t index) REQUIRES_LOCK(mutex_);
  void free_part(Part& part) REQUIRES_LOCK(mutex_);
  void run_uploads() noexcept;
  void upload_here() noexcept;
  void abort_after_the_last() noexcept;
  void send_queued() noexcept;
  void create_once() noexcept;
  void wait_until_created();
  ConstBuffer bytes_of(size_t index) const;
  void upload(size_t index);
  // Whatever goes wrong is the failure of the whole upload.
  void upload_or_fail(size_t index) noexcept;
  void fail(std::exception_ptr error) noexcept;
  void throw_if_failed() const REQUIRES_LOCK(mutex_);
  size_t cut_parts(uint64_t end) REQUIRES_LOCK(mutex_);
  void put_rest(const std::stop_token& stop);
  void stop_uploads() noexcept;

  const std::unique_ptr<MultipartTransport> transport_;
  const std::string name_;
  const MultipartOptions options_;
  const OwnerProcess owner_;
  std::stop_source stop_;  // of the uploads

  mutable Mutex mutex_;
  CondVar changed_;
  std::optional<PartSizes> sizes_ GUARDED_BY(mutex_);  // settled by the first write
  std::deque<Part> parts_ GUARDED_BY(mutex_);          // references stay valid
  std::deque<size_t> queue_ GUARDED_BY(mutex_);
  std::vector<ProcessJob> jobs_ GUARDED_BY(mutex_);  // that upload
  unsigned idle_ GUARDED_BY(mutex_) = 0;             // jobs that wait for a part
  unsigned running_ GUARDED_BY(mutex_) = 0;          // jobs that have not ended
  size_t pending_ GUARDED_BY(mutex_) = 0;            // parts queued or on their way
  uint64_t in_memory_ GUARDED_BY(mutex_) = 0;
  uint64_t peak_ GUARDED_BY(mutex_) = 0;
  uint64_t head_end_ GUARDED_BY(mutex_) = 1;  // part 0 is always of the head
  uint64_t extent_ GUARDED_BY(mutex_) = 0;    // the content reaches at least this far
  uint64_t published_ GUARDED_BY(mutex_) = 0;
  bool is_empty_ GUARDED_BY(mutex_) = false;  // what was published, which is an object too
  bool dirty_ GUARDED_BY(mutex_) = false;     // written to since the last publish
  bool closing_ GUARDED_BY(mutex_) = false;
  bool finished_ GUARDED_BY(mutex_) = false;
  enum class Upload : uint8_t { none, creating, created, ended };
  Upload upload_ GUARDED_BY(mutex_) = Upload::none;
  std::exception_ptr error_ GUARDED_BY(mutex_);
};

}  // namespace tensorizer::io
