#include "io/local/file_source.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <optional>
#include <utility>
#include <vector>

#include "core/checked_math.h"
#include "core/error.h"
#include "core/threads.h"
#include "io/local/file_calls.h"
#include "io/local/file_system.h"

namespace tensorizer::io {
namespace {

// Of a file that is not cached. The system reads ahead of each reader that goes on where it was:
// more readers than processors only compete for the page cache. Another machine answers more
// requests at once.
constexpr unsigned kColdReaders = 2;
constexpr unsigned kColdNetworkReaders = 8;
// Each stream takes a descriptor, and its read-ahead has to grow before it is worth one.
constexpr unsigned kMostStreams = 8;
constexpr uint64_t kLeastStreamNbytes = uint64_t{32} << 20;
constexpr unsigned kDirectReaders = 16;        // requests in flight that a disk wants to see
constexpr uint64_t kColdCallNbytes = 2 << 20;  // between two looks at the stop token

// Whether a byte is there without waiting for a disk. nullopt: the file system does not say, as
// overlayfs (containers) and tmpfs do not.
std::optional<bool> is_page_cached(int fd, uint64_t at) noexcept {
#if defined(RWF_NOWAIT)
  std::byte byte;
  const iovec one{&byte, 1};
  ssize_t got = 0;
  do {
    got = preadv2(fd, &one, 1, static_cast<off_t>(at), RWF_NOWAIT);
  } while (got < 0 && errno == EINTR);
  if (got < 0 && errno != EAGAIN) return std::nullopt;
  return got == 1;
#else
  (void)fd, (void)at;
  return std::nullopt;
#endif
}

// mincore() says "yes" for all files that the process neither owns nor may write to.
bool may_ask_for_residence(const struct stat& file) noexcept {
  const uid_t user = geteuid();
  return user == 0 || user == file.st_uid;
}

bool is_resident(int fd, uint64_t at) noexcept {
  const auto page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  void* const address =
      mmap(nullptr, page, PROT_READ, MAP_SHARED, fd, static_cast<off_t>(at / page * page));
  if (address == MAP_FAILED) return false;
  unsigned char resident = 0;
  const bool known = mincore(address, page, &resident) == 0;
  munmap(address, page);
  return known && (resident & 1) != 0;
}

// True when bytes all over the file are read without waiting for a disk. False where that cannot be
// found out.
bool is_cached(int fd, const struct stat& file) noexcept {
  const auto nbytes = static_cast<uint64_t>(file.st_size);
  if (nbytes == 0) return true;
  constexpr uint64_t kSamples = 16;
  // Not the same places for each opening: a miss makes the system read what is around it.
  uint64_t shift =
      static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
  for (uint64_t i = 0; i < kSamples; ++i) {
    shift = shift * 6364136223846793005U + 1442695040888963407U;
    const uint64_t part = std::max<uint64_t>(nbytes / kSamples, 1);
    const uint64_t at = std::min(part * i + (shift >> 33) % part, nbytes - 1);
    const std::optional<bool> cached = is_page_cached(fd, at);
    if (!cached.value_or(may_ask_for_residence(file) && is_resident(fd, at))) return false;
  }
  return true;
}

// The pages of a range leave the page cache, those at its edges too: a neighbour reads its page
// again. Pages that a program maps, or that are not on the disk yet, stay. A hint.
void let_go(int fd, uint64_t offset, uint64_t nbytes) noexcept {
  const auto page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  const uint64_t begin = align_down(offset, page);
  const uint64_t end = align_up(offset + nbytes, page);
  posix_fadvise(fd, static_cast<off_t>(begin), static_cast<off_t>(end - begin),
                POSIX_FADV_DONTNEED);
}

[[noreturn]] void throw_changed(Errc code, const std::string& name, const std::string& how) {
  throw Error(code,
              name + " changed while it was being loaded: " + how +
                  "; what was read may be a mix of both contents: load it again",
              name);
}

}  // namespace

// An open file. Immutable; reads share it.
struct FileSource::Handle {
  Handle(UniqueFd file, const std::string& file_name);
  Handle(UniqueFd file, const Handle& known);  // the same file once more
  void read(uint64_t offset, ScatterCursor left, const Streams* streams,
            const std::stop_token& stop) const;

  const std::string& name;
  UniqueFd fd;
  struct stat opened{};  // as it was then
  uint64_t nbytes = 0;
  bool cached = true;
  unsigned readers = cpu_quota();
  unsigned streams = 1;
};

FileSource::Handle::Handle(UniqueFd file, const std::string& file_name)
    : name(file_name), fd(std::move(file)) {
  if (fstat(fd.get(), &opened) != 0) throw_errno("cannot examine", name, errno);
  if (S_ISDIR(opened.st_mode)) throw_errno("cannot read", name, EISDIR);
  if (!S_ISREG(opened.st_mode)) throw Error(Errc::io, name + " is not a regular file", name);
  nbytes = static_cast<uint64_t>(opened.st_size);
  cached = is_cached(fd.get(), opened);
  if (cached) return;
  const bool on_network = network_file_system(fd.get()) != nullptr;
  readers = std::max(readers, on_network ? kColdNetworkReaders : kColdReaders);
  streams = static_cast<unsigned>(
      std::clamp<uint64_t>(nbytes / kLeastStreamNbytes, 1, std::min(readers, kMostStreams)));
}

FileSource::Handle::Handle(UniqueFd file, const Handle& known)
    : name(known.name),
      fd(std::move(file)),
      opened(known.opened),
      nbytes(known.nbytes),
      cached(known.cached),
      readers(known.readers),
      streams(known.streams) {}

// The same file, opened again for each part of it: the system reads ahead of each descriptor.
struct FileSource::Streams {
  int fd_at(uint64_t offset) const noexcept { return files[offset / part_nbytes].get(); }

  std::vector<UniqueFd> files;
  uint64_t part_nbytes = 0;
};

FileSource::FileSource(UniqueFd fd, std::string name) : name_(std::move(name)) {
  auto handle = std::make_shared<const Handle>(std::move(fd), name_);
  nbytes_ = handle->nbytes;
  MutexLock lock(mutex_);
  handle_ = std::move(handle);
}

FileSource::~FileSource() = default;

std::shared_ptr<const FileSource::Handle> FileSource::facts() const {
  MutexLock lock(mutex_);
  if (!handle_) throw Error(Errc::invalid_argument, name_ + " is closed", name_);
  return handle_;
}

std::shared_ptr<const FileSource::Handle> FileSource::handle() const {
  std::shared_ptr<const Handle> known = facts();
  if (known->fd) return known;
  std::string path;
  {
    MutexLock lock(mutex_);
    if (std::shared_ptr<const Handle> of_other_read = reopened_->lock()) return of_other_read;
    path = path_;
  }
  UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  struct stat found{};
  if (!fd || fstat(fd.get(), &found) != 0) throw_errno("cannot open again", name_, errno);
  if (found.st_dev != known->opened.st_dev || found.st_ino != known->opened.st_ino)
    throw_changed(Errc::io, name_, "another file has replaced it since it was opened");
  auto again = std::make_shared<const Handle>(std::move(fd), *known);
  MutexLock lock(mutex_);
  *reopened_ = again;
  return again;
}

std::shared_ptr<DirectFile> FileSource::direct_file(const Handle& file) const {
  {
    MutexLock lock(mutex_);
    if (*direct_file_ || !direct_ || path_.empty()) return *direct_file_;
  }
  return DirectFile::open(file.fd.get());
}

bool FileSource::is_direct() const {
  MutexLock lock(mutex_);
  return direct_;
}

std::shared_ptr<const FileSource::Streams> FileSource::streams() const {
  MutexLock lock(mutex_);
  return streams_->lock();
}

bool FileSource::was_cached() const { return facts()->cached; }

void FileSource::set_direct(bool direct) {
  std::shared_ptr<DirectFile> file = direct ? DirectFile::open(handle()->fd.get()) : nullptr;
  MutexLock lock(mutex_);
  direct_ = file != nullptr;
  if (!path_.empty()) return;  // each read opens it for itself
  direct_file_->swap(file);
}

void FileSource::close_between_reads(std::string path) {
  const std::shared_ptr<const Handle> known = facts();
  std::shared_ptr<const Handle> last = std::make_shared<const Handle>(UniqueFd(), *known);
  std::shared_ptr<DirectFile> last_direct;  // destroyed after the lock is given back, as `last`
  MutexLock lock(mutex_);
  if (!handle_) return;
  last.swap(handle_);
  last_direct.swap(*direct_file_);
  path_ = std::move(path);
}

void FileSource::close() noexcept {
  std::shared_ptr<const Handle> last;  // destroyed after the lock is given back
  std::shared_ptr<DirectFile> last_direct;
  MutexLock lock(mutex_);
  last.swap(handle_);
  last_direct.swap(*direct_file_);
}

void FileSource::check_unchanged() const {
  {
    MutexLock lock(mutex_);
    if (!handle_) return;  // closed
  }
  const std::shared_ptr<const Handle> file = handle();
  struct stat now{};
  if (fstat(file->fd.get(), &now) != 0) throw_errno("cannot examine", name_, errno);
  const auto nbytes = static_cast<uint64_t>(now.st_size);
  if (nbytes != nbytes_)
    throw_changed(nbytes < nbytes_ ? Errc::truncated : Errc::io, name_,
                  "it had " + std::to_string(nbytes_) + " bytes when it was opened and has " +
                      std::to_string(nbytes) + " now");
  const timespec& then = file->opened.st_mtim;
  if (now.st_mtim.tv_sec != then.tv_sec || now.st_mtim.tv_nsec != then.tv_nsec)
    throw_changed(Errc::io, name_, "it was written to");
}

bool FileSource::on_network_file_system() const {
  return network_file_system(handle()->fd.get()) != nullptr;
}

std::shared_ptr<FileMapping> FileSource::map() const {
  return FileMapping::create(handle()->fd.get(), nbytes_, name_);
}

SourceTraits FileSource::traits() const {
  // A cached file is bound by the processors, a cold one by the disk.
  if (is_direct()) return {.concurrency = std::max(cpu_quota(), kDirectReaders), .direct = true};
  const std::shared_ptr<const Handle> file = facts();
  return {.concurrency = file->readers, .streams = file->streams, .in_memory = file->cached};
}

std::shared_ptr<void> FileSource::open_streams() {
  const std::shared_ptr<const Handle> file = handle();
  if (file->streams < 2 || is_direct()) return nullptr;
  auto streams = std::make_shared<Streams>();
  streams->part_nbytes = ceil_div(nbytes_, uint64_t{file->streams});
  for (unsigned i = 0; i < file->streams; ++i) {
    UniqueFd again = open_again(file->fd.get(), 0);
    if (!again) return nullptr;  // one descriptor serves all, with less read ahead
    posix_fadvise(again.get(), 0, 0, POSIX_FADV_SEQUENTIAL);
    streams->files.push_back(std::move(again));
  }
  MutexLock lock(mutex_);
  *streams_ = streams;
  return streams;
}

// The page cache keeps pages in pieces of up to some megabytes. A piece that two reads shared has
// stayed in it until now.
void FileSource::end_load() noexcept {
  uint64_t begin = 0, end = 0;
  {
    MutexLock lock(mutex_);
    begin = std::exchange(read_begin_, UINT64_MAX);
    end = std::exchange(read_end_, 0);
  }
  if (begin >= end) return;
  try {
    let_go(handle()->fd.get(), begin, end - begin);
  } catch (const Error&) {  // closed, or replaced: a hint
  }
}

void FileSource::read_at(uint64_t offset, std::span<const Buffer> buffers,
                         const std::stop_token& stop) {
  const uint64_t wanted = total_nbytes(buffers);
  if (offset > nbytes_ || wanted > nbytes_ - offset)
    throw_truncated(name_, offset, wanted, nbytes_);
  const std::shared_ptr<const Handle> file = handle();
  ScatterCursor left(buffers);
  if (const std::shared_ptr<DirectFile> direct = direct_file(*file))
    direct->read(offset, left, stop);
  const std::shared_ptr<const Streams> separate = file->streams > 1 ? streams() : nullptr;
  file->read(offset, left, separate.get(), stop);
  if (lets_go_.load(std::memory_order_relaxed)) {
    let_go(file->fd.get(), offset, wanted);
    MutexLock lock(mutex_);
    read_begin_ = std::min(read_begin_, offset);
    read_end_ = std::max(read_end_, offset + wanted);
  }
  bytes_read_.fetch_add(wanted, std::memory_order_relaxed);
}

void FileSource::Handle::read(uint64_t offset, ScatterCursor left, const Streams* streams,
                              const std::stop_token& stop) const {
  std::array<iovec, kMaxVectors> vectors;
  while (left.room() > 0) {
    const size_t count = left.places(vectors, cached ? nbytes : kColdCallNbytes);
    throw_if_stopped(stop);
    const int from = streams ? streams->fd_at(offset) : fd.get();
    const ssize_t got =
        preadv(from, vectors.data(), static_cast<int>(count), static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw_errno("cannot read", name, errno);
    if (got == 0) throw_truncated(name, offset, 1, offset);
    offset += static_cast<uint64_t>(got);
    left.skip(static_cast<uint64_t>(got));
  }
}

}  // namespace tensorizer::io
