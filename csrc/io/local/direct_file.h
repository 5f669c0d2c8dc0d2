// A file opened once more with O_DIRECT: reads go from the disk to memory and leave the page cache
// as it is. Safe from many threads.
//
// The system takes whole blocks of the file, to addresses that are aligned likewise. Pages of the
// file whose place in memory is a page too are read to where they go; all others, those at the
// edges of what is asked for among them, come to a slot first, in the same call, and are copied.
//
// No page is read to that a thread might write to meanwhile: in a process that forks, such a write
// could leave the page that the disk fills behind.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <stop_token>
#include <vector>

#include "core/pages.h"
#include "core/sync.h"
#include "core/unique_fd.h"
#include "io/buffers.h"

namespace tensorizer::io {

class DirectFile {
 public:
  // The file that `fd` is open on. Null where it cannot be opened like that.
  static std::shared_ptr<DirectFile> open(int fd);

  // Reads to `left` what lies from `offset` on in the file, and moves both on by what has arrived.
  // Less than all is there at the end of the file, and where the file system refuses, now or
  // before: the caller reads the rest in another way. Throws Error: cancelled, out_of_memory.
  void read(uint64_t& offset, ScatterCursor& left, const std::stop_token& stop);

 private:
  struct Vectors;
  explicit DirectFile(UniqueFd fd) : fd_(std::move(fd)) {}

  Pages take_slot();
  void give_slot(Pages slot);

  const UniqueFd fd_;
  std::atomic<bool> refused_{false};
  Mutex mutex_;
  FreshInChild<std::vector<Pages>> slots_ GUARDED_BY(mutex_);  // that no read uses now
};

}  // namespace tensorizer::io
