#include "io/local/direct_file.h"

#include <fcntl.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <string>

#include "core/checked_math.h"
#include "core/error.h"
#include "io/local/file_calls.h"
#include "io/local/file_system.h"

namespace tensorizer::io {
namespace {

constexpr uint64_t kCallNbytes = uint64_t{4} << 20;
// An edge at either end goes along rather than have a call of its own.
constexpr uint64_t kSlotNbytes = kCallNbytes + 2 * kPageNbytes;

bool is_page(const void* address) noexcept {
  return reinterpret_cast<uintptr_t>(address) % kPageNbytes == 0;
}

}  // namespace

// What one system call reads: whole pages of the file from `begin` on, some to their places and the
// others to the slot.
struct DirectFile::Vectors {
  // Of the bytes from `offset` on, whose places are `ahead`, as many as one call may read.
  Vectors(uint64_t offset, ScatterCursor ahead, std::byte* slot_begin)
      : begin(align_down(offset, kPageNbytes)), slot(slot_begin), slot_end(slot_begin) {
    const uint64_t all = align_up(offset + ahead.room(), kPageNbytes) - begin;
    const uint64_t most = all <= kSlotNbytes ? all : kCallNbytes;
    while (nbytes < most && count < vectors.size()) {
      const uint64_t at = begin + nbytes;
      const uint64_t skip = offset > at ? offset - at : 0;  // of the first page
      iovec place{};
      ahead.places({&place, 1}, most - nbytes);
      const uint64_t pages = skip > 0 ? 0 : align_down(place.iov_len, kPageNbytes);
      if (pages > 0 && is_page(place.iov_base)) {
        vectors[count++] = {place.iov_base, pages};
        nbytes += pages;
        ahead.skip(pages);
      } else {
        const uint64_t n = std::max(pages, kPageNbytes);
        add_to_slot(n);
        ahead.skip(n - skip);
      }
    }
  }

  void add_to_slot(uint64_t n) noexcept {
    if (count > 0 && in_slot(vectors[count - 1])) {
      vectors[count - 1].iov_len += n;
    } else {
      vectors[count++] = {slot_end, n};
    }
    slot_end += n;
    nbytes += n;
  }

  bool in_slot(const iovec& vector) const noexcept {
    return vector.iov_base >= slot && vector.iov_base < slot + kSlotNbytes;
  }

  // Copies to their places what came to the slot of the first `got` bytes.
  void place(uint64_t got, uint64_t& offset, ScatterCursor& left) const noexcept {
    uint64_t at = begin;
    for (size_t i = 0; i < count && got > 0; ++i) {
      const uint64_t n = std::min<uint64_t>(vectors[i].iov_len, got);
      const uint64_t skip = offset > at ? std::min(offset - at, n) : 0;
      const uint64_t wanted = std::min(n - skip, left.room());
      if (in_slot(vectors[i])) {
        left.put({static_cast<const std::byte*>(vectors[i].iov_base) + skip, wanted});
      } else {
        left.skip(wanted);
      }
      offset += wanted;
      at += n;
      got -= n;
    }
  }

  const uint64_t begin;
  std::byte* const slot;
  std::byte* slot_end;
  std::array<iovec, kMaxVectors> vectors;
  size_t count = 0;
  uint64_t nbytes = 0;
};

std::shared_ptr<DirectFile> DirectFile::open(int fd) {
#if defined(O_DIRECT)
  if (UniqueFd own = open_again(fd, O_DIRECT))
    return std::shared_ptr<DirectFile>(new DirectFile(std::move(own)));
#endif
  return nullptr;
}

void DirectFile::read(uint64_t& offset, ScatterCursor& left, const std::stop_token& stop) {
  if (refused_.load(std::memory_order_relaxed) || left.room() == 0) return;
  Pages slot = take_slot();
  while (left.room() > 0) {
    throw_if_stopped(stop);
    const Vectors pages(offset, left, slot.get());
    const ssize_t got = preadv(fd_.get(), pages.vectors.data(), static_cast<int>(pages.count),
                               static_cast<off_t>(pages.begin));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) refused_.store(true, std::memory_order_relaxed);
    const uint64_t before = offset;
    if (got > 0) pages.place(static_cast<uint64_t>(got), offset, left);
    if (offset == before) break;
  }
  give_slot(std::move(slot));
}

Pages DirectFile::take_slot() {
  {
    const MutexLock lock(mutex_);
    std::vector<Pages>& slots = *slots_;
    if (!slots.empty()) {
      Pages slot = std::move(slots.back());
      slots.pop_back();
      return slot;
    }
  }
  return allocate_pages(kSlotNbytes);
}

void DirectFile::give_slot(Pages slot) {
  const MutexLock lock(mutex_);
  slots_->push_back(std::move(slot));
}

}  // namespace tensorizer::io
