// Where bytes come from: a file, an HTTP resource, Redis, memory, a Python file object. One per
// load.
//
// Stateless: reads name an explicit range, there is no cursor. Safe from many threads unless
// traits() says sequential. Fills exactly what was asked for or throws; a short read is
// Errc::truncated, never silence.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <stop_token>
#include <string>

#include "core/error.h"
#include "io/buffers.h"

namespace tensorizer::io {

// How a source likes to be read. Values, chosen by the source once it is open.
struct SourceTraits {
  // Readers that are useful at the same time, 1 or more; a load never starts more.
  unsigned concurrency = 1;
  // Bytes per read that amortise the cost of one request.
  uint64_t unit_nbytes = uint64_t{8} << 20;
  // Reading this many unwanted bytes is cheaper than starting another request.
  uint64_t gap_nbytes = uint64_t{64} << 10;
  // So many parts of the source are best read at the same time, each from its begin to its end.
  unsigned streams = 1;
  // True when reads should come one at a time at growing offsets, because going back costs a new
  // pass (an HTTP server without ranges, a file object that unpacks what it reads).
  bool sequential = false;
  // True when reads are answered from memory: a small one costs less than waking a thread for it.
  bool in_memory = false;
  // True when a read needs no copy where bytes go to the same place in a page of memory as they
  // have in a page of the source (kPageNbytes).
  bool direct = false;
  // True when the answer to a read comes from another machine: while a thread waits for it, others
  // may use what that one does not need yet.
  bool remote = false;
  // True when whole units should be read, and taken at growing offsets: a read that comes before
  // earlier ones waits for them.
  bool ascending = false;
};

// As much is read from memory sooner than another thread wakes up.
inline constexpr uint64_t kBriefNbytes = uint64_t{1} << 20;
// A source whose gap_nbytes are not more is asked for no more than is needed, and is read chunk by
// chunk when decrypting.
inline constexpr uint64_t kCheapRequestNbytes = uint64_t{64} << 10;

// Bytes that one read of a load takes.
struct Stretch {
  uint64_t offset = 0;
  uint64_t nbytes = 0;
};

// "<name> ends at byte <size>, but bytes <offset> to <offset+nbytes> are expected"
// (Errc::truncated).
[[noreturn]] void throw_truncated(const std::string& name, uint64_t offset, uint64_t nbytes,
                                  uint64_t source_nbytes);

class RangeSource {
 public:
  virtual ~RangeSource() = default;

  // For messages: a path or URL without credentials and without its query.
  virtual const std::string& name() const noexcept = 0;

  // Bytes from 0 to the end of the source; nullopt while it is not known (a server that does not
  // say).
  virtual std::optional<uint64_t> size() const = 0;

  virtual SourceTraits traits() const = 0;

  // Fills `buffers`, in order, with the consecutive bytes that start at `offset`.
  // Throws Error: truncated, io, not_found, cancelled. After an exception the buffers' contents are
  // undefined, and nothing writes to them any more.
  virtual void read_at(uint64_t offset, std::span<const Buffer> buffers,
                       const std::stop_token& stop) = 0;

  void read_at(uint64_t offset, Buffer into, const std::stop_token& stop) {
    read_at(offset, std::span<const Buffer>(&into, 1), stop);
  }

  // Like read_at, but stops at the end of the source; returns the bytes read, fewer only there.
  // Sources that wait for another machine call `progress`, if it is not empty, on this thread while
  // bytes arrive. It may throw.
  using Progress = std::function<void()>;
  virtual uint64_t read_with_progress(uint64_t offset, std::span<const Buffer> buffers,
                                      const std::stop_token& stop, const Progress& /*progress*/) {
    read_at(offset, buffers, stop);
    return total_nbytes(buffers);
  }

  // Like read_at, but stops at the end of the source; returns the bytes read, fewer only there.
  // This is how a source of unknown size is read whole.
  virtual uint64_t read_up_to(uint64_t offset, Buffer into, const std::stop_token& stop);

  // Called before the streams of traits() are read: until the result is destroyed, the source keeps
  // for each of them what makes it fast.
  virtual std::shared_ptr<void> open_streams() { return nullptr; }

  // A load of this source has ended.
  virtual void end_load() noexcept {}

  // Called when a load of an ascending source is planned: what it will read, in this order.
  virtual void expect(std::span<const Stretch> /*stretches*/) {}

  // Called before a load that will read `nbytes` of the source in all, for sources that keep what
  // is read. Throws Error(cancelled).
  virtual void begin_load(uint64_t /*nbytes*/, const std::stop_token& /*stop*/) {}

  // Throws Error (io; truncated where the source is shorter now) if it can tell that the content is
  // no longer that of the opening. Sources that check every read by itself have nothing to add.
  virtual void check_unchanged() const {}

  // Address of bytes [offset, offset + nbytes) if they are in memory already and stay there as long
  // as this object lives; nullptr otherwise. Lets the cipher read from where the bytes are.
  virtual const std::byte* view(uint64_t /*offset*/, uint64_t /*nbytes*/) noexcept {
    return nullptr;
  }

  // What was read turned out to be damaged: true where some of it came from a copy, which is
  // removed.
  virtual bool drop_copy() noexcept { return false; }

  // Gives back descriptors and connections, once no read is running; later reads are
  // Errc::invalid_argument. Called again, or never, it does no harm: the destructor does the same.
  virtual void close() noexcept {}

  // Payload and header bytes that arrived so far, for the counters of the Python side.
  virtual uint64_t bytes_read() const noexcept = 0;
};

// In the handler of `error`, for bytes that turned out to be damaged: removes the copy that some of
// them came from and throws the error with a word about that. Returns where there is no copy.
void drop_damaged_copy(RangeSource& source, const Error& error);

// Fills `into` with the bytes from `offset` on, in units of the source's liking on as many threads
// as it finds useful: for callers that have no load session.
void read_parallel(RangeSource& source, uint64_t offset, Buffer into, const std::stop_token& stop);

}  // namespace tensorizer::io
