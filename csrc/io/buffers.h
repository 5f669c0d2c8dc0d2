// Scatter lists: consecutive bytes of a source that land in (or come from) several places of
// memory.
#pragma once

#include <sys/uio.h>
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

namespace tensorizer::io {

using Buffer = std::span<std::byte>;
using ConstBuffer = std::span<const std::byte>;

inline uint64_t total_nbytes(std::span<const Buffer> buffers) noexcept {
  uint64_t total = 0;
  for (const Buffer& buffer : buffers) total += buffer.size();
  return total;
}

inline uint64_t total_nbytes(std::span<const ConstBuffer> buffers) noexcept {
  uint64_t total = 0;
  for (const ConstBuffer& buffer : buffers) total += buffer.size();
  return total;
}

// The `nbytes` of a scatter list that begin at `skip`.
inline std::vector<Buffer> part_of(std::span<const Buffer> buffers, uint64_t skip,
                                   uint64_t nbytes) {
  std::vector<Buffer> part;
  for (const Buffer& buffer : buffers) {
    const uint64_t dropped = std::min<uint64_t>(skip, buffer.size());
    skip -= dropped;
    const uint64_t taken = std::min<uint64_t>(buffer.size() - dropped, nbytes);
    if (taken > 0)
      part.push_back(buffer.subspan(static_cast<size_t>(dropped), static_cast<size_t>(taken)));
    nbytes -= taken;
    if (nbytes == 0) break;
  }
  return part;
}

// A place within a list of buffers, where the next bytes go to or come from. Borrows the list and
// its memory.
template <class Byte>
class BufferCursor {
 public:
  BufferCursor() = default;
  // Starts `skip` bytes into the list.
  explicit BufferCursor(std::span<const std::span<Byte>> buffers, uint64_t skip = 0) noexcept
      : buffers_(buffers), room_(total_nbytes(buffers)) {
    this->skip(skip);
  }

  // Copies as much as there is room for; returns how much that was.
  size_t put(std::span<const std::byte> bytes) noexcept {
    size_t done = 0;
    while (done < bytes.size() && room_ > 0) {
      drop_full();
      const std::span<Byte>& buffer = buffers_.front();
      const size_t n = std::min(bytes.size() - done, buffer.size() - used_);
      std::memcpy(buffer.data() + used_, bytes.data() + done, n);
      advance(n);
      done += n;
    }
    return done;
  }

  // Notes that the next `nbytes` are in place.
  void skip(uint64_t nbytes) noexcept {
    while (nbytes > 0 && !buffers_.empty()) {
      const uint64_t n = std::min<uint64_t>(nbytes, buffers_.front().size() - used_);
      advance(static_cast<size_t>(n));
      nbytes -= n;
    }
  }

  // Fills `into` with the places of the next bytes, at most `limit` of them; returns how many
  // entries that took.
  size_t places(std::span<iovec> into, uint64_t limit) const noexcept {
    size_t count = 0, used = used_;
    for (const std::span<Byte>& buffer : buffers_) {
      if (count == into.size() || limit == 0) break;
      const size_t nbytes = static_cast<size_t>(std::min<uint64_t>(limit, buffer.size() - used));
      if (nbytes > 0) into[count++] = {const_cast<std::byte*>(buffer.data()) + used, nbytes};
      limit -= nbytes;
      used = 0;
    }
    return count;
  }

  // The place of the next bytes, at most `limit` of them; empty only where there is no room.
  std::span<Byte> place(uint64_t limit) noexcept {
    drop_full();
    if (buffers_.empty()) return {};
    const std::span<Byte> left = buffers_.front().subspan(used_);
    return left.first(static_cast<size_t>(std::min<uint64_t>(limit, left.size())));
  }

  uint64_t room() const noexcept { return room_; }

 private:
  void advance(size_t n) noexcept {
    used_ += n;
    room_ -= n;
    drop_full();
  }
  void drop_full() noexcept {
    while (!buffers_.empty() && used_ == buffers_.front().size()) {
      buffers_ = buffers_.subspan(1);
      used_ = 0;
    }
  }

  std::span<const std::span<Byte>> buffers_;
  size_t used_ = 0;  // of the first buffer
  uint64_t room_ = 0;
};
using ScatterCursor = BufferCursor<std::byte>;
using GatherCursor = BufferCursor<const std::byte>;

}  // namespace tensorizer::io
