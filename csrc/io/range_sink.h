// Where bytes go: a local file under a temporary name, an open descriptor, a multipart upload, a
// Python file object.
//
// write_at is safe from many threads. Every byte of the content is written at least once; the index
// is written behind the records, then comes a barrier(), then the prologue; all of it in front of
// them where the sink is in_order(). Content becomes visible under its final name by publish() and
// by nothing else; the destructor only abandons.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <stop_token>
#include <string>

#include "core/error.h"
#include "io/buffers.h"

namespace tensorizer::io {

class RangeSink {
 public:
  virtual ~RangeSink() = default;

  // For messages, without credentials.
  virtual const std::string& name() const noexcept = 0;

  // Writers that are useful at the same time; 0: as many as there are processors.
  virtual unsigned concurrency() const noexcept { return 0; }

  // True where the system lets one thread at a time write: another one would only wait for it.
  virtual bool one_writer() const noexcept { return false; }

  // True where writes may come in any order at no cost, in memory either: a file. An upload holds
  // the parts that are not complete.
  virtual bool any_order() const noexcept { return false; }

  // True where bytes are taken only from the first to the last, each of them once: by some mounts
  // of object stores.
  virtual bool in_order() const noexcept { return false; }

  // How many stretches of the content may be under way at once within the sink's memory, however
  // many writers there are; 0: any number.
  virtual unsigned places() const { return 0; }

  // Whether bytes [begin, end) have memory now, so that a write there waits for nothing. A thread
  // that writes units in a fixed order asks before it begins one: then those that were begun can
  // all be ended, and make room for the next. See RoomWish.
  enum class RoomWish : uint8_t {
    now,     // answers at once
    soon,    // waits a moment for room
    anyway,  // the same, and takes more than the sink's budget where no upload would make room.
             // REQUIRES: no byte is missing of the units before this one
  };
  virtual bool make_room(uint64_t /*begin*/, uint64_t /*end*/, RoomWish /*wish*/) { return true; }

  // A hint, before reserve(): bytes [0, end) are prologue and index and may be written again by any
  // call; all others are written once.
  virtual void reserve_head(uint64_t /*end*/) {}

  // A hint, before the first write of a call: the content will reach `end`. May reserve room; may
  // throw Errc::io when it is already certain that the room is missing.
  virtual void reserve(uint64_t /*end*/) {}

  // Writes the concatenation of `buffers` at `offset`. Returns when the caller's memory is no
  // longer needed.
  virtual void write_at(uint64_t offset, std::span<const ConstBuffer> buffers,
                        const std::stop_token& stop) = 0;

  void write_at(uint64_t offset, ConstBuffer from, const std::stop_token& stop) {
    write_at(offset, std::span<const ConstBuffer>(&from, 1), stop);
  }

  // Calls `fill` with memory of the sink for the bytes [offset, offset + nbytes), all of which it
  // fills, and takes them as written; saves the caller a buffer and a copy. False, without a
  // call: there is no such memory in one piece, and write_at() does it. REQUIRES: `fill` throws
  // nothing.
  virtual bool fill_at(uint64_t /*offset*/, uint64_t /*nbytes*/,
                       const std::function<void(Buffer)>& /*fill*/,
                       const std::stop_token& /*stop*/) {
    return false;
  }

  // Moves the bytes [from, from + nbytes) to `to` >= `from`, for a file whose index outgrew its
  // room.
  virtual void relocate(uint64_t from, uint64_t nbytes, uint64_t to,
                        const std::stop_token& stop) = 0;

  // True: relocate() copies into a new file, the published one stays as it is until the next
  // publish(), and undo_relocate() goes back to it.
  virtual bool relocates_to_new_file() const noexcept { return false; }
  virtual void undo_relocate() noexcept {}

  // Returns when everything that was written before the call is on the disk, so that a crash of the
  // machine cannot keep a later write and lose an earlier one. A writer calls it between the
  // records with their index and the prologue that counts them. Sinks do nothing where no crash can
  // damage published content: nothing is published yet, or the file is never synced.
  virtual void barrier(const std::stop_token& /*stop*/) {}

  // True where publishing costs much more than writing: `nbytes` of complete records may then wait
  // for those of later calls, for finish() or for abandon().
  virtual bool may_wait(uint64_t /*nbytes*/) const noexcept { return false; }

  // True where writing and publishing some KiB takes no longer than waking a thread for it.
  virtual bool in_memory() const noexcept { return false; }

  // [start, end) is complete and consistent now: make it readable by others (flush, sync, rename,
  // as the sink does).
  virtual void publish(uint64_t end, const std::stop_token& stop) = 0;

  // What was written behind `end` is void; `end` is 0 if nothing was published.
  virtual void rollback(uint64_t /*end*/) noexcept {}

  // No call follows, and what was not published is void. An upload in progress is aborted.
  virtual void abandon() noexcept {}

  // No call follows. Whatever can fail for the user's data happens here, not in the destructor.
  virtual void finish(const std::stop_token& stop) = 0;
};

// What a sink that is in_order() says about content that has to be written in another order.
[[noreturn]] inline void throw_out_of_order(const std::string& name, const std::string& what) {
  throw Error(Errc::io,
              name + ": its mount takes bytes only from front to back, and " + what +
                  ". Save a .safetensors file, or a .tensors file with hashes=None in a single "
                  "call; or save to another place and copy the file",
              name);
}

// What sinks that move content in place say after a move that failed halfway.
[[noreturn]] inline void throw_damaged(const std::string& name) {
  throw Error(Errc::io,
              name +
                  ": an earlier call failed while it moved the content behind a larger index, "
                  "and nothing more can be written",
              name);
}

}  // namespace tensorizer::io
