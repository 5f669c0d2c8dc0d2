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
constexpr uint64_t kBlockNbytes = 4096;      // alignment that O_DIRECT accepts everywhere
constexpr uint64_t kBounceNbytes = 1 << 20;  // one request; several threads keep the device busy
constexpr uint64_t kDirectNbytes = 4 << 20;  // one request straight into the destination
constexpr uint64_t kDirectWorthNbytes = 1
                                        << 20;  // smaller files and reads go through the page cache
constexpr unsigned kColdReaders = 8;            // requests in flight that a disk wants to see
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

// Descriptors of an open file and the reads on them. Immutable; reads share it.
struct FileSource::Handles {
  Handles(UniqueFd file, const std::string& file_name);
  ~Handles();
  Handles(const Handles&) = delete;
  Handles& operator=(const Handles&) = delete;

  bool is_cached(uint64_t offset, uint64_t nbytes) const noexcept;
  void read_cached(uint64_t offset, std::span<const Slice> slices,
                   const std::stop_token& stop) const;
  void read_direct(uint64_t offset, std::span<const Slice> slices,
                   const std::stop_token& stop) const;
  void direct_into(uint64_t offset, Slice into) const;
  void direct_bounced(uint64_t offset, Slice into) const;

  const std::string& name;
  UniqueFd fd;
  UniqueFd direct_fd;  // the same file opened with O_DIRECT; empty where the file system has none
  uint64_t nbytes = 0;
  std::byte* probe =
      nullptr;  // an untouched mapping, only ever handed to mincore(): it cannot fault
};

FileSource::Handles::Handles(UniqueFd file, const std::string& file_name)
    : name(file_name), fd(std::move(file)) {
  struct stat info {};
  if (fstat(fd.get(), &info) != 0) throw_errno("cannot examine", name, errno);
  if (S_ISDIR(info.st_mode)) throw_errno("cannot read", name, EISDIR);
  if (!S_ISREG(info.st_mode)) throw Error(Errc::io, name + " is not a regular file", name);
  nbytes = static_cast<uint64_t>(info.st_size);
#if defined(O_DIRECT)
  if (nbytes >= kDirectWorthNbytes) {
    const std::string again = "/proc/self/fd/" + std::to_string(fd.get());
    direct_fd = UniqueFd(open(again.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT));
    void* map = mmap(nullptr, nbytes, PROT_READ, MAP_SHARED, fd.get(), 0);
    if (map == MAP_FAILED) {
      direct_fd.reset();
    } else {
      probe = static_cast<std::byte*>(map);
    }
  }
#endif
}

FileSource::Handles::~Handles() {
  if (probe != nullptr) munmap(probe, nbytes);
}

FileSource::FileSource(UniqueFd fd, std::string name) : name_(std::move(name)) {
  auto handles = std::make_shared<const Handles>(std::move(fd), name_);
  nbytes_ = handles->nbytes;
  MutexLock lock(mutex_);
  handles_ = std::move(handles);
}

FileSource::~FileSource() = default;

std::shared_ptr<const FileSource::Handles> FileSource::handles() const {
  MutexLock lock(mutex_);
  if (!handles_) throw Error(Errc::invalid_argument, name_ + " is closed", name_);
  return handles_;
}

void FileSource::close() noexcept {
  std::shared_ptr<const Handles> last;  // destroyed after the lock is given back
  MutexLock lock(mutex_);
  last.swap(handles_);
}

std::shared_ptr<FileMapping> FileSource::map() const {
  return FileMapping::create(handles()->fd.get(), nbytes_, name_);
}

SourceTraits FileSource::traits() const {
  // A sample of the file decides: a cached file is bound by the processors, a cold one by the disk.
  constexpr uint64_t kSamples = 16;
  unsigned cold = 0;
  const std::shared_ptr<const Handles> file = handles();
  if (file->direct_fd) {
    for (uint64_t i = 0; i < kSamples; ++i) {
      const uint64_t at = align_down(nbytes_ / kSamples * i, kPageNbytes);
      cold += file->is_cached(at, std::min(kPageNbytes, nbytes_ - at)) ? 0 : 1;
    }
  }
  const unsigned cpus = cpu_quota();
  return {.concurrency = cold > 0 ? std::max(cpus, kColdReaders) : cpus, .prompt = cold == 0};
}

bool FileSource::Handles::is_cached(uint64_t offset, uint64_t nbytes) const noexcept {
  if (probe == nullptr) return true;
  std::array<unsigned char, 4096> resident;  // one byte per page: 16 MiB at a time
  const uint64_t end = std::min(offset + nbytes, nbytes);
  for (uint64_t at = align_down(offset, kPageNbytes); at < end;) {
    const uint64_t span = std::min<uint64_t>(end - at, resident.size() * kPageNbytes);
    if (mincore(probe + at, span, resident.data()) != 0) return true;
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
  const std::shared_ptr<const Handles> file = handles();
  if (file->direct_fd && wanted >= kDirectWorthNbytes && !file->is_cached(offset, wanted)) {
    file->read_direct(offset, slices, stop);
  } else {
    file->read_cached(offset, slices, stop);
  }
  bytes_read_.fetch_add(wanted, std::memory_order_relaxed);
}

void FileSource::Handles::read_cached(uint64_t offset, std::span<const Slice> slices,
                                      const std::stop_token& stop) const {
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
    const ssize_t got =
        preadv(fd.get(), vectors.data(), static_cast<int>(count), static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw_errno("cannot read", name, errno);
    uint64_t left = static_cast<uint64_t>(got);
    offset += left;
    const bool wanted_some = std::any_of(vectors.begin(), vectors.begin() + count,
                                         [](const iovec& v) { return v.iov_len > 0; });
    if (got == 0 && wanted_some) throw_truncated(name, offset, 1, offset);
    while (next < slices.size() && left >= slices[next].size() - done_in) {
      left -= slices[next].size() - done_in;
      done_in = 0;
      ++next;
    }
    done_in += left;
  }
}

void FileSource::Handles::read_direct(uint64_t offset, std::span<const Slice> slices,
                                      const std::stop_token& stop) const {
  // Large slices whose memory is aligned like the file are read in place, the rest through a
  // buffer.
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
    const bool congruent = (reinterpret_cast<uintptr_t>(slice.data()) - offset) % kBlockNbytes == 0;
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
void FileSource::Handles::direct_into(uint64_t offset, Slice into) const {
  while (!into.empty()) {
    const ssize_t got =
        pread(direct_fd.get(), into.data(), into.size(), static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EINVAL) {  // a file system with larger blocks: the page cache can do it
      read_cached(offset, std::span<const Slice>(&into, 1), {});
      return;
    }
    if (got < 0) throw_errno("cannot read", name, errno);
    if (got == 0) throw_truncated(name, offset, into.size(), offset);
    const auto step = static_cast<uint64_t>(got);
    offset += step;
    into = into.subspan(step);
    if (step % kBlockNbytes != 0 && !into.empty())
      throw_truncated(name, offset, into.size(), offset);
  }
}

// REQUIRES: the blocks that `into` covers fit into the bounce buffer.
void FileSource::Handles::direct_bounced(uint64_t offset, Slice into) const {
  std::byte* buffer = bounce_buffer();
  const uint64_t begin = align_down(offset, kBlockNbytes);
  const uint64_t wanted = offset - begin + into.size();
  const uint64_t length = align_up(wanted, kBlockNbytes);
  uint64_t have = 0;
  while (have < wanted) {
    const ssize_t got =
        pread(direct_fd.get(), buffer + have, length - have, static_cast<off_t>(begin + have));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EINVAL) {
      read_cached(offset, std::span<const Slice>(&into, 1), {});
      return;
    }
    if (got < 0) throw_errno("cannot read", name, errno);
    have += static_cast<uint64_t>(got);
    if (have < wanted && (got == 0 || have % kBlockNbytes != 0))
      throw_truncated(name, offset, into.size(), begin + have);
  }
  std::memcpy(into.data(), buffer + (offset - begin), into.size());
}

}  // namespace tensorizer::io
