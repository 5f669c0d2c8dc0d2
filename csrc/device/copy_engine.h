// Moves bytes between pinned host buffers and device memory. One engine is one load or save on one
// device; each of its workers has a copier of its own.
//
// A host destination needs no engine: readers write to it directly. For a device, a worker takes a
// buffer, fills it (read, decrypt), sends pieces of it, goes on with the next buffer, and waits for
// its own oldest copies when it has no buffer left. Buffers come out of one budget of the device,
// shared by all loads and saves of the process.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <stop_token>

#include "device/chunk_to_open.h"

namespace tensorizer::device {

// `nbytes` from `buffer_offset` in a buffer to (or from) the device address.
struct CopyPiece {
  uint64_t buffer_offset;
  std::byte* device_address;
  uint64_t nbytes;
};

// A stretch of device memory.
struct DeviceRange {
  std::byte* device_address;
  uint64_t nbytes;
};

// One worker's way to or from a device: a few buffers, copies in the order in which they are asked
// for. Made, used and destroyed by one thread. When it dies no copy of it touches any memory any
// more, and its buffers are back in the budget.
class Copier {
 public:
  virtual ~Copier() = default;

  // The buffer to fill next, which send() and fetch() are about from now on. Empty where none can
  // be had at once: then wait(), and try again.
  virtual std::span<std::byte> try_acquire() = 0;

  // Ends the use of the oldest buffer that try_acquire() returned and wait() has not ended: returns
  // when its copies are done. Its bytes may be gone then: others wait for buffers too. Where there
  // is none, waits until the budget has a buffer. Throws Error: cancelled, device.
  virtual void wait(const std::stop_token& stop) = 0;

  // Whether wait() is about a buffer of this copier; it waits in line otherwise.
  virtual bool has_in_use() const noexcept = 0;

  // Gives back every buffer from which nothing was sent, the one that try_acquire() returned last
  // too.
  virtual void give_back_unused() noexcept {}

  // Returns when the caller's work is done that was asked for before the latest
  // CopyEngine::order_after_caller(): the memory may be written to. Throws Error: cancelled,
  // device.
  virtual void pass_fence(const std::stop_token& /*stop*/) {}

  // Starts copying pieces of the buffer to the device; returns at once. Once per buffer. Passes the
  // fence first, as begin_fetch() does. Throws Error: cancelled, device.
  virtual void send(std::span<const CopyPiece> pieces, const std::stop_token& stop) = 0;

  // How many encrypted chunks of one buffer the device opens; 0 where it opens none now. Throws
  // Error: cancelled, device.
  virtual size_t most_chunks_to_open(const std::stop_token& /*stop*/) { return 0; }

  // Room for what the device is told about so many chunks of the buffer. It is wiped with the use
  // of the buffer.
  virtual std::span<ChunkToOpen> chunks_to_open(const std::stop_token& /*stop*/) { return {}; }

  // As send(). Then the device opens the first `chunks` of chunks_to_open(), in place, those that
  // are genuine. Where one is not, wait() and finish() call `refuse` with the number of the first
  // such chunk, which throws. REQUIRES: pieces cover each chunk.
  virtual void send_to_open(std::span<const CopyPiece> pieces, size_t /*chunks*/,
                            const std::function<void(size_t)>& /*refuse*/,
                            const std::stop_token& stop) {
    send(pieces, stop);
  }

  // Starts copying pieces from the device into the buffer. Once per buffer.
  virtual void begin_fetch(std::span<const CopyPiece> pieces, const std::stop_token& stop) = 0;
  // Returns when the oldest fetch that was begun and not ended is done; its buffer stays in use.
  virtual void end_fetch(const std::stop_token& stop) = 0;

  // Returns when all copies are done. Throws Error: cancelled, device.
  virtual void finish(const std::stop_token& stop) = 0;
};

// The next buffer of a copier. `release` is called before the copier's oldest buffer may be used
// again, `before_blocking` before the thread waits in line.
template <class Release>
std::span<std::byte> next_buffer(Copier& copier, const std::stop_token& stop, Release&& release,
                                 const std::function<void()>& before_blocking = {}) {
  for (;;) {
    const std::span<std::byte> buffer = copier.try_acquire();
    if (!buffer.empty()) return buffer;
    release();
    if (before_blocking && !copier.has_in_use()) before_blocking();
    copier.wait(stop);
  }
}

class CopyEngine {
 public:
  virtual ~CopyEngine() = default;

  // Bytes of one buffer: no unit may need more.
  virtual uint64_t buffer_nbytes() const noexcept = 0;

  // True when the caller's earlier work on the device's memory is done: copies may start.
  virtual bool is_ready() const noexcept = 0;

  // Copies of copiers that are made from now on run after what the caller has asked the device for
  // up to now. To be called once the memory is allocated: the allocator may hand out memory that
  // earlier work still uses. Throws Error: device, invalid_argument.
  virtual void order_after_caller() = 0;

  // A copier for the calling thread. `secret`: its buffers will hold plaintext of an encrypted
  // file, and are wiped before others get them. REQUIRES: the engine outlives it.
  virtual std::unique_ptr<Copier> make_copier(bool secret) = 0;

  // When all copiers of a load are gone: overwrites memory of the device with zeros and waits until
  // it is. Gives up, silently, where the device takes no more orders: the first failure is on its
  // way to the caller. REQUIRES: a copier has passed the fence that stands for this memory; work of
  // the caller may still use other memory.
  virtual void wipe(std::span<const DeviceRange> destinations) noexcept = 0;
};

}  // namespace tensorizer::device
