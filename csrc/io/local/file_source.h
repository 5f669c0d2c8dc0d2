// A regular local file, read with positional reads on a descriptor of its own. Safe from many
// threads.
//
// Reads go through the page cache, where the next load of the file, or one at the same time, finds
// it; or past it (set_direct), where the file system lets them.
//
// A program that replaces the file by another of the same name does no harm: the descriptor goes on
// to show the old one. A program that writes to this file, cuts it or extends it changes its size
// or its time of modification: check_unchanged() throws then.
#pragma once

#include <atomic>
#include <memory>
#include <string>

#include "core/sync.h"
#include "core/unique_fd.h"
#include "io/local/direct_file.h"
#include "io/local/file_mapping.h"
#include "io/range_source.h"

namespace tensorizer::io {

class FileSource final : public RangeSource {
 public:
  // Takes the descriptor of an open file. Throws Error: io (cannot be examined, not a regular
  // file).
  FileSource(UniqueFd fd, std::string name);
  ~FileSource() override;

  const std::string& name() const noexcept override { return name_; }
  std::optional<uint64_t> size() const override { return nbytes_; }
  SourceTraits traits() const override;
  using RangeSource::read_at;
  void read_at(uint64_t offset, std::span<const Buffer> buffers,
               const std::stop_token& stop) override;
  uint64_t bytes_read() const noexcept override {
    return bytes_read_.load(std::memory_order_relaxed);
  }

  std::shared_ptr<void> open_streams() override;
  void end_load() noexcept override;

  void check_unchanged() const override;

  void close() noexcept override;

  // Gives the descriptor back. From now on reads open the file for themselves, by `path`, which has
  // to stay the name of this file: they throw Error(io) where it is that of another inode. For sets
  // of more files than a process should have open.
  void close_between_reads(std::string path);

  // Whether bytes all over the file were in the page cache when it was opened.
  bool was_cached() const;

  // Whether reads that begin from now on go past the page cache.
  void set_direct(bool direct);

  // What is read from now on leaves the page cache behind the reader.
  void let_go_behind() noexcept { lets_go_.store(true, std::memory_order_relaxed); }

  // Whether the file is on a file system of another machine, or on one that a program serves
  // (FUSE), where a page that is missing later costs a round trip, or the process when it fails.
  bool on_network_file_system() const;

  // A private mapping of the whole file. Throws Error(io).
  std::shared_ptr<FileMapping> map() const;

 private:
  struct Handle;
  struct Streams;
  // What reads use: they keep it alive, so that close() never pulls a descriptor from under one of
  // them. Opens the file where its descriptor was given back.
  std::shared_ptr<const Handle> handle() const;
  // What is known of the file without a descriptor.
  std::shared_ptr<const Handle> facts() const;
  // Of an open file that is read past the page cache; else null.
  std::shared_ptr<DirectFile> direct_file(const Handle& file) const;
  bool is_direct() const;
  std::shared_ptr<const Streams> streams() const;

  std::string name_;
  uint64_t nbytes_ = 0;
  mutable Mutex mutex_;
  std::shared_ptr<const Handle> handle_ GUARDED_BY(mutex_);  // null once closed
  std::string path_ GUARDED_BY(mutex_);  // not empty: handle_ has no descriptor between reads
  mutable FreshInChild<std::weak_ptr<const Handle>> reopened_ GUARDED_BY(mutex_);
  bool direct_ GUARDED_BY(mutex_) = false;
  // Null: through the page cache.
  mutable FreshInChild<std::shared_ptr<DirectFile>> direct_file_ GUARDED_BY(mutex_);
  mutable FreshInChild<std::weak_ptr<const Streams>> streams_ GUARDED_BY(mutex_);
  std::atomic<uint64_t> bytes_read_{0};
  std::atomic<bool> lets_go_{false};
  // What was read since the last load ended, where it leaves the cache; from the first byte to the
  // last.
  uint64_t read_begin_ GUARDED_BY(mutex_) = UINT64_MAX;
  uint64_t read_end_ GUARDED_BY(mutex_) = 0;
};

}  // namespace tensorizer::io
