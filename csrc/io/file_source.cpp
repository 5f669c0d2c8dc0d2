#include "io/file_source.h"

#include <fcntl.h>
#include <limits.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "core/checked_math.h"
#include "core/error.h"
#include "core/stop.h"
#include "core/threads.h"

namespace tensorizer::io {
namespace {

constexpr uint64_t kPageNbytes = 4096;
constexpr uint64_t kBlockNbytes = 4096;          // alignment that O_DIRECT accepts everywhere
constexpr uint64_t kBounceNbytes = 1 << 20;      // one request; several threads keep the device busy
constexpr uint64_t kDirectNbytes = 4 << 20;      // one request straight into the destination
constexpr uint64_t kDirectWorthNbytes = 1 << 20; // smaller files and reads go through the page cache
constexpr unsigned kColdReaders = 8;             // requests in flight that a disk wants to see
constexpr size_t kIovMax = 512;

struct FreeDeleter {
  void operator()(void* p) const noexcept { std::free(p); }
};

// One aligned buffer per reading thread, made when a thread first needs it.
std::byte* bounce_buffer() {
  static thread_local std::unique_ptr<std::byte, FreeDeleter> buffer;
  if (!buffer) {
    void* memory = nullptr;
    if (posix_memalign(&memory, kBlockNbytes, kBounceNbytes) != 0)
      throw Error(Errc::out_of_memory, "no memory for a read buffer of 1 MiB");
    buffer.reset(static_cast<std::byte*>(memory));
  }
  return buffer.get();
}

}  // namespace

FileSource::FileSource(UniqueFd fd, std::string name) : fd_(std::move(fd)), name_(std::move(name)) {
  struct stat info {};
  if (fstat(fd_.get(), &info) != 0) throw_errno("cannot examine", name_, errno);
  if (S_ISDIR(info.st_mode)) throw_errno("cannot read", name_, EISDIR);
  if (!S_ISREG(info.st_mode)) throw Error(Errc::io, name_ + " is not a regular file", name_);
  nbytes_ = static_cast<uint64_t>(info.st_size);
#if defined(O_DIRECT)
  if (nbytes_ >= kDirectWorthNbytes) {
    const std::string again = "/proc/self/fd/" + std::to_string(fd_.get());
    direct_fd_ = UniqueFd(open(again.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT));
    void* map = mmap(nullptr, nbytes_, PROT_READ, MAP_SHARED, fd_.get(), 0);
    if (map == MAP_FAILED) {
      direct_fd_.reset();
    } else {
      probe_ = static_cast<std::byte*>(map);
    }
  }
#endif
}

FileSource::~FileSource() {
  if (probe_ != nullptr) munmap(probe_, nbytes_);
}

SourceTraits FileSource::traits() const {
  // A sample of the file decides: a cached file is bound by the processors, a cold one by the disk.
  constexpr uint64_t kSamples = 16;
  unsigned cold = 0;
  if (direct_fd_) {
    for (uint64_t i = 0; i < kSamples; ++i) {
      const uint64_t at = align_down(nbytes_ / kSamples * i, kPageNbytes);
      cold += is_cached(at, std::min(kPageNbytes, nbytes_ - at)) ? 0 : 1;
    }
  }
  const unsigned cpus = cpu_quota();
  return {.concurrency = cold > 0 ? std::max(cpus, kColdReaders) : cpus};
}

bool FileSource::is_cached(uint64_t offset, uint64_t nbytes) const noexcept {
  if (probe_ == nullptr) return true;
  std::array<unsigned char, 4096> resident;  // one byte per page: 16 MiB at a time
  const uint64_t end = std::min(offset + nbytes, nbytes_);
  for (uint64_t at = align_down(offset, kPageNbytes); at < end;) {
    const uint64_t span = std::min<uint64_t>(end - at, resident.size() * kPageNbytes);
    if (mincore(probe_ + at, span, resident.data()) != 0) return true;
    const uint64_t pages = ceil_div(span, kPageNbytes);
    for (uint64_t i = 0; i < pages; ++i) {
      if ((resident[i] & 1) == 0) return false;
    }
    at += pages * kPageNbytes;
  }
  return true;
}

void FileSource::read_at(uint64_t offset, std::span<const Slice> slices,
                         const std::stop_token& stop) {
  const uint64_t wanted = total_nbytes(slices);
  if (offset > nbytes_ || wanted > nbytes_ - offset)
    throw_truncated(name_, offset, wanted, nbytes_);
  if (direct_fd_ && wanted >= kDirectWorthNbytes && !is_cached(offset, wanted)) {
    read_direct(offset, slices, stop);
  } else {
    read_cached(offset, slices, stop);
  }
  bytes_read_.fetch_add(wanted, std::memory_order_relaxed);
}

void FileSource::read_cached(uint64_t offset, std::span<const Slice> slices,
                             const std::stop_token& stop) {
  std::array<iovec, kIovMax> vectors;
  size_t next = 0;       // first slice that is not complete
  uint64_t done_in = 0;  // bytes of it that have arrived
  while (next < slices.size()) {
    size_t count = 0;
    for (size_t i = next; i < slices.size() && count < kIovMax; ++i) {
      const uint64_t skip = i == next ? done_in : 0;
      vectors[count++] = {slices[i].data() + skip, slices[i].size() - skip};
    }
    throw_if_stopped(stop);
    const ssize_t got = preadv(fd_.get(), vectors.data(), static_cast<int>(count),
                               static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw_errno("cannot read", name_, errno);
    uint64_t left = static_cast<uint64_t>(got);
    offset += left;
    const bool wanted_some = std::any_of(vectors.begin(), vectors.begin() + count,
                                         [](const iovec& v) { return v.iov_len > 0; });
    if (got == 0 && wanted_some) throw_truncated(name_, offset, 1, offset);
    while (next < slices.size() && left >= slices[next].size() - done_in) {
      left -= slices[next].size() - done_in;
      done_in = 0;
      ++next;
    }
    done_in += left;
  }
}

void FileSource::read_direct(uint64_t offset, std::span<const Slice> slices,
                             const std::stop_token& stop) {
  // Large slices whose memory is aligned like the file are read in place, the rest through a buffer.
  std::vector<Slice> small;
  uint64_t small_at = offset;
  auto flush_small = [&] {
    if (!small.empty()) read_cached(small_at, small, stop);
    small.clear();
  };
  for (const Slice& slice : slices) {
    if (slice.size() < 64 * 1024) {  // headers and small tensors: one buffered read, however many
      if (small.empty()) small_at = offset;
      small.push_back(slice);
      offset += slice.size();
      continue;
    }
    flush_small();
    const bool congruent =
        (reinterpret_cast<uintptr_t>(slice.data()) - offset) % kBlockNbytes == 0;
    uint64_t done = 0;
    while (done < slice.size()) {
      throw_if_stopped(stop);
      const uint64_t at = offset + done;
      const uint64_t left = slice.size() - done;
      uint64_t step = 0;
      if (congruent && at % kBlockNbytes == 0 && left >= kBlockNbytes) {
        step = std::min(align_down(left, kBlockNbytes), kDirectNbytes);
        direct_into(at, slice.subspan(done, step));
      } else {
        const uint64_t to_boundary = kBounceNbytes - at % kBlockNbytes;
        step = std::min(left, congruent ? std::min(kBlockNbytes - at % kBlockNbytes, to_boundary)
                                        : to_boundary);
        direct_bounced(at, slice.subspan(done, step));
      }
      done += step;
    }
    offset += slice.size();
  }
  flush_small();
}

// REQUIRES: offset, address and length are multiples of the block size.
void FileSource::direct_into(uint64_t offset, Slice into) {
  while (!into.empty()) {
    const ssize_t got =
        pread(direct_fd_.get(), into.data(), into.size(), static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EINVAL) {  // a file system with larger blocks: the page cache can do it
      read_cached(offset, std::span<const Slice>(&into, 1), {});
      return;
    }
    if (got < 0) throw_errno("cannot read", name_, errno);
    if (got == 0) throw_truncated(name_, offset, into.size(), offset);
    const auto step = static_cast<uint64_t>(got);
    offset += step;
    into = into.subspan(step);
    if (step % kBlockNbytes != 0 && !into.empty()) throw_truncated(name_, offset, into.size(), offset);
  }
}

// REQUIRES: the blocks that `into` covers fit into the bounce buffer.
void FileSource::direct_bounced(uint64_t offset, Slice into) {
  std::byte* buffer = bounce_buffer();
  const uint64_t begin = align_down(offset, kBlockNbytes);
  const uint64_t wanted = offset - begin + into.size();
  const uint64_t length = align_up(wanted, kBlockNbytes);
  uint64_t have = 0;
  while (have < wanted) {
    const ssize_t got = pread(direct_fd_.get(), buffer + have, length - have,
                              static_cast<off_t>(begin + have));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EINVAL) {
      read_cached(offset, std::span<const Slice>(&into, 1), {});
      return;
    }
    if (got < 0) throw_errno("cannot read", name_, errno);
    have += static_cast<uint64_t>(got);
    if (have < wanted && (got == 0 || have % kBlockNbytes != 0))
      throw_truncated(name_, offset, into.size(), begin + have);
  }
  std::memcpy(into.data(), buffer + (offset - begin), into.size());
}

}  // namespace tensorizer::io
