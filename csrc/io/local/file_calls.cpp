#include "io/local/file_calls.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>

#include "core/error.h"
#include "core/unique_fd.h"

namespace tensorizer::io {

FileCalls& FileCalls::system() {
  static auto* const calls = new FileCalls;
  return *calls;
}

namespace {

// By which link() finds a file without a name.
std::string place_of(int fd) { return "/proc/self/fd/" + std::to_string(fd); }

}  // namespace

int FileCalls::open_unnamed(const std::string& folder, unsigned mode) {
  UniqueFd fd(open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, mode));
  if (fd && access(place_of(fd.get()).c_str(), F_OK) != 0) {  // without /proc
    errno = EOPNOTSUPP;
    return -1;
  }
  return fd.release();
}

int FileCalls::open_new(const std::string& path, unsigned mode) {
  return open(path.c_str(), O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, mode);
}

int FileCalls::open_cut(const std::string& path) {
  return open(path.c_str(), O_RDWR | O_TRUNC | O_CLOEXEC);
}

int FileCalls::close(int fd) noexcept { return ::close(fd); }

ssize_t FileCalls::write(int fd, const iovec* vectors, int count, uint64_t offset) {
  return pwritev(fd, vectors, count, static_cast<off_t>(offset));
}

ssize_t FileCalls::copy(int from, off_t* from_offset, int to, off_t* to_offset, uint64_t nbytes) {
  return copy_file_range(from, from_offset, to, to_offset, nbytes, 0);
}

int FileCalls::reserve(int fd, bool keep_size, uint64_t offset, uint64_t nbytes) {
  return fallocate(fd, keep_size ? FALLOC_FL_KEEP_SIZE : 0, static_cast<off_t>(offset),
                   static_cast<off_t>(nbytes));
}

int FileCalls::truncate(int fd, uint64_t nbytes) {
  return ftruncate(fd, static_cast<off_t>(nbytes));
}

void FileCalls::push(int fd, uint64_t offset, uint64_t nbytes) noexcept {
  sync_file_range(fd, static_cast<off_t>(offset), static_cast<off_t>(nbytes),
                  SYNC_FILE_RANGE_WRITE);
}

int FileCalls::sync(int fd) { return fsync(fd); }

int FileCalls::sync_data(int fd) { return fdatasync(fd); }

int FileCalls::check_written(int fd) noexcept {
  if (sync_file_range(fd, 0, 0, SYNC_FILE_RANGE_WAIT_BEFORE) == 0) return 0;
  return errno == EIO || is_full(errno) ? -1 : 0;  // other errors: there is no such call here
}

int FileCalls::link(int fd, const std::string& path) {
  return linkat(AT_FDCWD, place_of(fd).c_str(), AT_FDCWD, path.c_str(), AT_SYMLINK_FOLLOW);
}

int FileCalls::rename(const std::string& from, const std::string& to) {
  return std::rename(from.c_str(), to.c_str());
}

int FileCalls::unlink(const std::string& path) noexcept { return ::unlink(path.c_str()); }

int FileCalls::sync_folder(const std::string& folder) {
  const UniqueFd fd(open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  return fd ? fsync(fd.get()) : -1;
}

}  // namespace tensorizer::io
