#include "io/cache/cache_entry.h"

#include <fcntl.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <ctime>
#include <utility>

#include "core/error.h"

namespace tensorizer::io {
namespace {

// Bytes of `lock` that are locked. None is ever there.
constexpr off_t kUseLock = 0;
constexpr off_t kCopyLock = 1;
constexpr int64_t kProgressNanoseconds = 200'000'000;

// 0, or errno. A lock belongs to the open file description and ends with it.
int set_lock(int fd, short type, off_t at) noexcept {
  struct flock range{};
  range.l_type = type;
  range.l_whence = SEEK_SET;
  range.l_start = at;
  range.l_len = 1;
  while (fcntl(fd, F_OFD_SETLK, &range) != 0) {
    if (errno != EINTR) return errno;
  }
  return 0;
}

bool is_conflict(int error) noexcept { return error == EAGAIN || error == EACCES; }

UniqueFd open_file(int folder, const char* name, int flags) {
  // O_NONBLOCK: if a FIFO lies there, the call must not wait for its other end.
  return UniqueFd(openat(folder, name, flags | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0600));
}

UniqueFd make_file(int folder, const char* name) {
  UniqueFd fd = open_file(folder, name, O_RDWR | O_CREAT | O_EXCL);
  if (!fd || fchmod(fd.get(), 0600) != 0) throw_errno("cannot make", name, errno);
  return fd;
}

void write_all(int fd, const char* name, const std::string& content) {
  for (size_t done = 0; done < content.size();) {
    const ssize_t n = write(fd, content.data() + done, content.size() - done);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) throw_errno("cannot write", name, n == 0 ? ENOSPC : errno);
    done += static_cast<size_t>(n);
  }
}

bool is_own_regular_file(const struct stat& found) noexcept {
  return S_ISREG(found.st_mode) && found.st_uid == geteuid() &&
         (found.st_mode & (S_IWGRP | S_IWOTH)) == 0;
}

int64_t nanoseconds_of(const timespec& time) noexcept {
  return int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

}  // namespace

void CacheEntry::create_files(int folder, const std::string& about) {
  make_file(folder, "lock");
  write_all(make_file(folder, "about.json").get(), "about.json", about);
}

bool CacheEntry::is_used(int folder) noexcept {
  const UniqueFd file = open_file(folder, "lock", O_RDWR);
  return file && !take_for_removal(file.get());
}

bool CacheEntry::take_for_removal(int lock) noexcept {
  return !is_conflict(set_lock(lock, F_WRLCK, kUseLock));
}

bool CacheEntry::has_copy(int folder, uint64_t nbytes) noexcept {
  struct stat found{};
  return fstatat(folder, "data", &found, AT_SYMLINK_NOFOLLOW) == 0 && is_own_regular_file(found) &&
         static_cast<uint64_t>(found.st_size) == nbytes;
}

std::shared_ptr<CacheEntry> CacheEntry::open(UniqueFd folder, uint64_t nbytes) {
  std::shared_ptr<CacheEntry> entry(new CacheEntry());
  entry->lock_ = open_file(folder.get(), "lock", O_RDWR);
  // It may be all right where it cannot be opened, and is not to be removed.
  if (!entry->lock_ && errno != ENOENT && errno != ELOOP) throw_errno("cannot open", "lock", errno);
  entry->folder_ = std::move(folder);
  struct stat found{};
  if (!entry->lock_ || fstat(entry->lock_.get(), &found) != 0 || !is_own_regular_file(found))
    return nullptr;
  if (const int error = set_lock(entry->lock_.get(), F_RDLCK, kUseLock); error != 0) {
    if (is_conflict(error)) return nullptr;
    throw_errno("cannot lock", "lock", error);
  }
  const bool is_absent =
      fstatat(entry->folder_.get(), "data", &found, AT_SYMLINK_NOFOLLOW) != 0 && errno == ENOENT;
  return is_absent || has_copy(entry->folder_.get(), nbytes) ? entry : nullptr;
}

CacheEntry::~CacheEntry() {
  if (!lock_ || !owner_.is_this_one()) return;
  end_copy();
  unlock();
}

UniqueFd CacheEntry::open_copy() const {
  UniqueFd fd = open_file(folder_.get(), "data", O_RDONLY);
  if (!fd && errno != ENOENT) throw_errno("cannot open", "data", errno);
  return fd;
}

bool CacheEntry::begin_copy() {
  const int error = set_lock(lock_.get(), F_WRLCK, kCopyLock);
  if (error != 0 && !is_conflict(error)) throw_errno("cannot lock", "lock", error);
  return error == 0;
}

void CacheEntry::end_copy() noexcept { set_lock(lock_.get(), F_UNLCK, kCopyLock); }

void CacheEntry::show_progress() noexcept {
  timespec now{};
  clock_gettime(CLOCK_REALTIME, &now);
  const int64_t since = nanoseconds_of(now) - last_progress();
  if (since < 0 || since > kProgressNanoseconds) futimens(lock_.get(), nullptr);
}

int64_t CacheEntry::last_progress() const noexcept {
  struct stat found{};
  return fstat(lock_.get(), &found) == 0 ? nanoseconds_of(found.st_mtim) : 0;
}

void CacheEntry::write_about(const std::string& about) noexcept {
  uint64_t number = 0;
  if (getrandom(&number, sizeof number, GRND_NONBLOCK) != sizeof number) return;
  const std::string name = ".about-" + std::to_string(number);
  try {
    write_all(make_file(folder_.get(), name.c_str()).get(), name.c_str(), about);
    if (renameat(folder_.get(), name.c_str(), folder_.get(), "about.json") == 0) return;
  } catch (const std::exception&) {
  }
  unlinkat(folder_.get(), name.c_str(), 0);
}

void CacheEntry::touch() noexcept {
  struct stat found{};
  if (fstatat(folder_.get(), "about.json", &found, AT_SYMLINK_NOFOLLOW) != 0) return;
  const std::time_t age = std::time(nullptr) - found.st_mtim.tv_sec;
  if (age < 0 || age >= 60) utimensat(folder_.get(), "about.json", nullptr, AT_SYMLINK_NOFOLLOW);
}

void CacheEntry::unlock() noexcept { set_lock(lock_.get(), F_UNLCK, kUseLock); }

}  // namespace tensorizer::io
