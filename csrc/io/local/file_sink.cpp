#include "io/local/file_sink.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/threads.h"
#include "io/local/file_system.h"

namespace tensorizer::io {
namespace {

// Says how much is needed and how much the file system has.
[[noreturn]] void throw_full(int fd, uint64_t nbytes, const std::string& name, int err) {
  std::string room = std::to_string(nbytes) + " bytes are needed";
  struct statvfs found{};
  if (fstatvfs(fd, &found) == 0) {
    room += ", " + std::to_string(static_cast<uint64_t>(found.f_bavail) * found.f_frsize) +
            " are free,";
  }
  throw_errno("no room: " + room + " for", name, err);
}

constexpr uint64_t kWritebackNbytes = uint64_t{1} << 20;  // smaller writes wait for company
constexpr uint64_t kReserveNbytes = uint64_t{1} << 20;    // less is not worth a call
constexpr unsigned kSyncedWriters = 4;  // while they wait for the disk, others hash
constexpr uint64_t kCopyNbytes = uint64_t{8} << 20;

std::string folder_of(const std::string& path) {
  const size_t slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

std::string base_of(const std::string& path) { return path.substr(path.rfind('/') + 1); }

// ".name.0123456789abcdef.tmp" beside the target; the base is cut so that the whole stays a legal
// file name.
std::string temporary_name(const std::string& target) {
  std::random_device device;
  char suffix[32];
  std::snprintf(suffix, sizeof suffix, ".%08x%08x.tmp", device(), device());
  return folder_of(target) + "/." + base_of(target).substr(0, 200) + suffix;
}

void read_all(int fd, uint64_t offset, std::byte* data, uint64_t nbytes, const std::string& name) {
  while (nbytes > 0) {
    const ssize_t got = pread(fd, data, nbytes, static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw_errno("cannot read back", name, errno);
    if (got == 0) throw Error(Errc::io, name + " was cut short by somebody else", name);
    offset += static_cast<uint64_t>(got);
    data += got;
    nbytes -= static_cast<uint64_t>(got);
  }
}

// A driver that takes bytes only from front to back says no more than that an argument is invalid.
[[noreturn]] void throw_write_failed(int fd, uint64_t offset, const std::string& name, int err) {
  struct stat info{};
  const bool refuses_order = (err == EINVAL || err == ESPIPE || err == EOPNOTSUPP) &&
                             (fcntl(fd, F_GETFL) & O_DIRECT) == 0;  // which wants whole blocks
  if (refuses_order && fstat(fd, &info) == 0 && static_cast<uint64_t>(info.st_size) != offset)
    throw_out_of_order(name, "byte " + std::to_string(offset) + " came before others");
  throw_errno("cannot write", name, err);
}

}  // namespace

bool set_access(int fd, const FileAccess& access, const std::string& name) {
  // Before the mode, since a new owner takes the set-user-ID bit away.
  const bool given = fchown(fd, access.owner, access.group) == 0 ||
                     fchown(fd, static_cast<uid_t>(-1), access.group) == 0;
  static_cast<void>(given);
  if (fchmod(fd, access.mode) == 0) return true;
  if (errno != EPERM && errno != ENOSYS && errno != EOPNOTSUPP && errno != EINVAL)
    throw_errno("cannot set the mode of", name, errno);
  struct stat info{};
  return fstat(fd, &info) == 0 && (info.st_mode & 07777) == access.mode;
}

FileSink::FileSink(std::string name, std::string target, const PathOptions& options)
    : name_(std::move(name)), target_(std::move(target)), options_(options) {}

std::shared_ptr<FileSink> FileSink::replace(const std::string& target, const PathOptions& options) {
  std::shared_ptr<FileSink> sink(new FileSink(target, target, options));
  sink->open_unnamed();
  return sink;
}

std::shared_ptr<FileSink> FileSink::in_place(const std::string& target,
                                             const PathOptions& options) {
  std::shared_ptr<FileSink> sink(new FileSink(target, {}, options));
  sink->place_ = target;
  return sink;
}

std::shared_ptr<FileSink> FileSink::overwrite(UniqueFd fd, const std::string& name) {
  std::shared_ptr<FileSink> sink(new FileSink(name, {}, {}));
  sink->fd_ = std::move(fd);
  return sink;
}

FileSink::~FileSink() { close_all(); }

// The name belongs to the process that made it, not to a child that was forked meanwhile.
void FileSink::drop_temporary() noexcept {
  if (!temporary_.empty() && owner_.is_this_one()) options_.calls->unlink(temporary_);
  temporary_.clear();
}

// An unnamed file leaves nothing behind, whatever kills this process; a hidden temporary name is
// the second choice, for file systems without unnamed files.
void FileSink::open_unnamed() {
  const unsigned mode = options_.access ? options_.access->mode : 0666;
  UniqueFd fd(options_.calls->open_unnamed(folder_of(target_), mode));
  if (!fd && errno != EOPNOTSUPP && errno != EISDIR && errno != EINVAL && errno != ENOENT)
    throw_errno("cannot write", target_, errno);
  std::string temporary;
  if (!fd) {
    temporary = temporary_name(target_);
    fd = UniqueFd(options_.calls->open_new(temporary, mode));
    if (!fd) throw_errno("cannot write", target_, errno);
  }
  drop_temporary();
  temporary_ = temporary;
  owner_ = OwnerProcess();
  fd_ = std::move(fd);
  named_ = false;
  extent_ = 0;
  if (options_.access) has_mode_ = set_access(fd_.get(), *options_.access, target_);
}

void FileSink::open_in_place() {
  UniqueFd fd(options_.calls->open_cut(place_));
  is_made_ = !fd && errno == ENOENT;
  if (is_made_) fd = UniqueFd(options_.calls->open_new(place_, 0666));
  if (!fd) throw_errno("cannot write", place_, errno);
  fd_ = std::move(fd);
  owner_ = OwnerProcess();
  extent_ = 0;
}

// All bytes are there, and no name can be had for them.
void FileSink::go_on_in_place(uint64_t end, const std::stop_token& stop) {
  UniqueFd old = std::move(fd_);
  place_ = std::exchange(target_, {});
  try {
    open_in_place();
  } catch (...) {
    target_ = std::exchange(place_, {});
    fd_ = std::move(old);
    throw;
  }
  copy_range(old.get(), 0, end, 0, stop);
  extent_ = end;
  replaced_.reset();
  drop_temporary();
}

unsigned FileSink::concurrency() const noexcept {
  return is_synced() ? std::max(cpu_quota(), kSyncedWriters) : 0;
}

// Linux says once that it could not write a page, and may drop it then: the next sync succeeds
// without it.
void FileSink::throw_if_lost() const {
  if (!lost_) return;
  throw Error(Errc::io,
              name_ +
                  ": an earlier sync failed, so the system may have dropped what was written; "
                  "nothing more is published, and the file keeps what was synced before",
              name_);
}

void FileSink::reserve(uint64_t end) {
  if (damaged_) throw_damaged(name_);
  throw_if_lost();
  if (!fd_ && !target_.empty()) open_unnamed();
  if (!fd_ && !place_.empty()) open_in_place();
  if (end <= extent_ || (named_ && end - extent_ < kReserveNbytes)) return;
  // One thread would make the pages of a new file before anything is fetched or hashed; a thread
  // that writes them does that as well.
  if (!named_ && !target_.empty() && is_in_memory(fd_.get())) return;
  if (options_.calls->reserve(fd_.get(), target_.empty(), extent_, end - extent_) != 0) {
    if (is_full(errno)) throw_full(fd_.get(), end - extent_, name_, errno);
    return;
  }
  extent_ = end;
}

void FileSink::write_at(uint64_t offset, std::span<const ConstBuffer> buffers,
                        const std::stop_token& stop) {
  const uint64_t begin = offset;
  std::array<iovec, kMaxVectors> vectors;
  for (GatherCursor left(buffers); left.room() > 0;) {
    throw_if_stopped(stop);
    const auto count = static_cast<int>(left.places(vectors, left.room()));
    const ssize_t wrote = options_.calls->write(fd_.get(), vectors.data(), count, offset);
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote <= 0) throw_write_failed(fd_.get(), offset, name_, wrote < 0 ? errno : EIO);
    offset += static_cast<uint64_t>(wrote);
    left.skip(static_cast<uint64_t>(wrote));
  }
  begin_writeback(begin, offset - begin);
}

// Content that has to reach the disk sets out at once, so that the disk works while the next
// tensors are hashed, and the final fsync finds little left to do. It stays in the page cache.
void FileSink::begin_writeback(uint64_t offset, uint64_t nbytes) const noexcept {
  if (is_synced() && nbytes >= kWritebackNbytes) options_.calls->push(fd_.get(), offset, nbytes);
}

void FileSink::relocate(uint64_t from, uint64_t nbytes, uint64_t to, const std::stop_token& stop) {
  if (target_.empty()) {
    relocate_in_place(from, nbytes, to, stop);
  } else {
    relocate_to_new_file(from, nbytes, to, stop);
  }
}

// Back to front, so that no byte is overwritten before it has moved.
void FileSink::relocate_in_place(uint64_t from, uint64_t nbytes, uint64_t to,
                                 const std::stop_token& stop) {
  reserve(to + nbytes);  // a full disk is noticed before anything has moved
  std::vector<std::byte> buffer(std::min({nbytes, kCopyNbytes, to - from}));
  for (uint64_t left = nbytes; left > 0;) {
    throw_if_stopped(stop);
    const uint64_t n = std::min<uint64_t>(left, buffer.size());
    left -= n;
    read_all(fd_.get(), from + left, buffer.data(), n, name_);
    if (to + left < from + nbytes) damaged_ = true;  // until all has moved
    write_at(to + left, ConstBuffer(buffer.data(), n), {});
  }
  damaged_ = false;
  extent_ = std::max(extent_, to + nbytes);
}

// The published file stays as it is, and at hand; the new one takes its name at the next publish().
void FileSink::relocate_to_new_file(uint64_t from, uint64_t nbytes, uint64_t to,
                                    const std::stop_token& stop) {
  throw_if_lost();
  UniqueFd old = std::move(fd_);
  struct stat info{};
  if (fstat(old.get(), &info) == 0)
    options_.access = FileAccess{info.st_mode & 07777, info.st_uid, info.st_gid};
  const uint64_t old_extent = extent_;
  const bool was_named = named_;
  try {
    open_unnamed();
    copy_range(old.get(), from, nbytes, to, stop);
    if (options_.fsync && options_.calls->check_written(old.get()) != 0) {
      lost_ = true;  // the copy may have been made of what the disk has instead
      throw_errno("cannot write", name_, errno);
    }
  } catch (...) {
    drop_temporary();
    fd_ = std::move(old);
    extent_ = old_extent;
    named_ = was_named;
    throw;
  }
  extent_ = to + nbytes;
  replaced_ = std::move(old);
  replaced_extent_ = old_extent;
}

void FileSink::undo_relocate() noexcept {
  if (!replaced_) return;
  drop_temporary();
  fd_ = std::move(replaced_);
  extent_ = replaced_extent_;
  named_ = true;
}

// From another file into this one, inside the system where it can.
void FileSink::copy_range(int old, uint64_t from, uint64_t nbytes, uint64_t to,
                          const std::stop_token& stop) {
  auto in = static_cast<off_t>(from);
  auto out = static_cast<off_t>(to);
  for (uint64_t left = nbytes; left > 0;) {
    throw_if_stopped(stop);
    const ssize_t copied =
        options_.calls->copy(old, &in, fd_.get(), &out, std::min(left, kCopyNbytes));
    if (copied > 0) {
      left -= static_cast<uint64_t>(copied);
      continue;
    }
    if (copied < 0 && errno == EINTR) continue;
    if (copied < 0 && is_full(errno)) throw_full(fd_.get(), left, name_, errno);
    std::vector<std::byte> buffer(
        std::min(left, kCopyNbytes));  // this file system cannot: read and write
    read_all(old, static_cast<uint64_t>(in), buffer.data(), buffer.size(), name_);
    write_at(static_cast<uint64_t>(out), ConstBuffer(buffer), {});
    in += static_cast<off_t>(buffer.size());
    out += static_cast<off_t>(buffer.size());
    left -= buffer.size();
  }
}

void FileSink::barrier(const std::stop_token& stop) {
  throw_if_stopped(stop);
  throw_if_lost();
  if (!is_synced() || !named_) return;
  if (options_.calls->sync_data(fd_.get()) != 0) {
    lost_ = true;
    throw_errno("cannot sync", name_, errno);
  }
  synced_at_ = std::chrono::steady_clock::now();
}

bool FileSink::may_wait(uint64_t nbytes) const noexcept {
  return is_synced() && named_ && nbytes < options_.wait_nbytes &&
         std::chrono::steady_clock::now() - synced_at_ < options_.wait;
}

void FileSink::publish(uint64_t end, const std::stop_token& stop) {
  throw_if_stopped(stop);
  if (target_.empty()) {
    extent_ = std::max(extent_, end);
    published_ = true;
    return;
  }
  if (extent_ > end && options_.calls->truncate(fd_.get(), end) != 0)
    throw_errno("cannot set the size of", name_, errno);
  extent_ = end;
  if (named_) {
    unsynced_ = true;  // all but the prologue is there, see barrier()
    return;
  }
  if (options_.fsync && options_.calls->sync(fd_.get()) != 0) {
    const int problem = errno;
    lost_ = static_cast<bool>(replaced_);  // the first file of all is made anew by the next call
    throw_errno("cannot sync", name_, problem);
  }
  take_name(end, stop);
  published_ = true;
}

void FileSink::take_name(uint64_t end, const std::stop_token& stop) {
  FileCalls& calls = *options_.calls;
  const char* failed = nullptr;
  if (temporary_.empty()) {
    std::string temporary = temporary_name(target_);
    if (calls.link(fd_.get(), temporary) == 0) {
      temporary_ = std::move(temporary);
      owner_ = OwnerProcess();
    } else {
      failed = "cannot name";
    }
  }
  if (failed == nullptr && calls.rename(temporary_, target_) != 0) failed = "cannot rename to";
  if (failed != nullptr) {
    const int problem = errno;
    if (!gives_no_names(problem)) throw_errno(failed, target_, problem);
    return go_on_in_place(end, stop);
  }
  temporary_.clear();
  named_ = true;
  unsynced_ = false;
  replaced_.reset();
  if (!options_.fsync) return;
  calls.sync_folder(folder_of(target_));  // some file systems cannot; the rename stands either way
  synced_at_ = std::chrono::steady_clock::now();
}

void FileSink::rollback(uint64_t end) noexcept {
  if (target_.empty()) return;
  extent_ = end;
  if (!named_) {  // nothing of it may stay, on disk or open; reserve() starts anew
    close_all();
    return;
  }
  if (options_.calls->truncate(fd_.get(), end) != 0 || end < 8) return;
  std::array<std::byte, 8> end_mark{};  // appended records had overwritten it
  const iovec mark{end_mark.data(), end_mark.size()};
  const ssize_t restored = options_.calls->write(fd_.get(), &mark, 1, end - 8);
  (void)restored;  // readers do not need the mark
  unsynced_ = true;
}

// Descriptors of callers are theirs to sync and to close.
void FileSink::finish_in_place() {
  if (!published_ || !fd_) return close_all();
  const bool failed = options_.fsync && options_.calls->sync(fd_.get()) != 0 && errno != EINVAL &&
                      errno != ENOSYS && errno != EOPNOTSUPP;
  const int problem = errno;
  const bool closed = options_.calls->close(fd_.release()) == 0 || errno == EINTR;
  const int later_problem = errno;
  close_all();
  if (failed) throw_errno("cannot sync", name_, problem);
  if (!closed) throw_errno("cannot close", name_, later_problem);
}

void FileSink::finish(const std::stop_token& /*stop*/) {
  if (!place_.empty()) return finish_in_place();
  const bool sync = is_synced() && named_ && unsynced_ && !lost_;
  const bool failed = sync && options_.calls->sync_data(fd_.get()) != 0;
  const int problem = errno;
  close_all();
  throw_if_lost();
  if (failed) throw_errno("cannot sync", name_, problem);
}

void FileSink::close_all() noexcept {
  fd_.reset();
  if (is_made_ && !published_ && owner_.is_this_one()) options_.calls->unlink(place_);
  is_made_ = false;
  replaced_.reset();
  drop_temporary();
}

}  // namespace tensorizer::io
