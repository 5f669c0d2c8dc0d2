// The system calls by which a file sink changes files. Each does one call and says what the call
// says, errno included; tests stand in between, to count them and to cut the power at any of them.
// Safe from many threads.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <cstdint>
#include <string>

namespace tensorizer::io {

inline constexpr size_t kMaxVectors = 512;  // per call; IOV_MAX is 1024

class FileCalls {
 public:
  virtual ~FileCalls() = default;

  // Those of the system. Never destroyed.
  static FileCalls& system();

  // A new file: without a name in `folder`, where it can get one later, or under a name that no
  // file has.
  virtual int open_unnamed(const std::string& folder, unsigned mode);
  virtual int open_new(const std::string& path, unsigned mode);
  // The file that is there, cut to nothing.
  virtual int open_cut(const std::string& path);
  // Some file systems store only now, and say what failed.
  virtual int close(int fd) noexcept;

  virtual ssize_t write(int fd, const iovec* vectors, int count, uint64_t offset);
  // From another file, inside the system; both offsets move on.
  virtual ssize_t copy(int from, off_t* from_offset, int to, off_t* to_offset, uint64_t nbytes);
  virtual int reserve(int fd, bool keep_size, uint64_t offset, uint64_t nbytes);
  virtual int truncate(int fd, uint64_t nbytes);

  // Content sets out for the disk, and stays in the page cache. A hint: a sync says what failed.
  virtual void push(int fd, uint64_t offset, uint64_t nbytes) noexcept;
  // All of the file is on the disk on return; its content and what is needed to find it.
  virtual int sync(int fd);
  virtual int sync_data(int fd);
  // Whether all pages that have set out for the disk arrived there: what was read back since is the
  // content then, and not what an earlier page on the disk has. Waits for those on their way.
  virtual int check_written(int fd) noexcept;

  // Gives an unnamed file a name; moves a name over another; forgets one.
  virtual int link(int fd, const std::string& path);
  virtual int rename(const std::string& from, const std::string& to);
  virtual int unlink(const std::string& path) noexcept;
  // The names in a folder are on the disk on return.
  virtual int sync_folder(const std::string& folder);
};

}  // namespace tensorizer::io
