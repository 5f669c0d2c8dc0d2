// A local file being written: under no name (or a temporary one) until it is first published, or an
// open descriptor. write_at is safe from many threads; everything else is confined to the session's
// thread.
//
// With PathOptions::fsync a crash of the machine at any moment leaves the content of some complete
// call: a file is synced before it takes its name; content that is added later is synced before
// the prologue that counts it (barrier), and the whole once more by finish(). What replaces the
// index or moves the records goes into a new file, which is synced and takes the name. After a sync
// that failed nothing more is published.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>

#include "core/fork.h"
#include "core/unique_fd.h"
#include "io/local/file_calls.h"
#include "io/range_sink.h"

namespace tensorizer::io {

// What owner, group and others may do with a file.
struct FileAccess {
  unsigned mode = 0;     // permission bits; umask does not apply
  uint32_t owner = -1U;  // this and the next: -1 leaves what a new file has
  uint32_t group = -1U;
};

// Owner, group and mode as far as the system permits: only root gives files away, and not every
// mount has modes. False: the mode is that of the new file. Throws Error(io).
bool set_access(int fd, const FileAccess& access, const std::string& name);

class FileSink final : public RangeSink {
 public:
  struct PathOptions {
    bool fsync = true;  // sync file and directory before the name appears, and at the end
    std::optional<FileAccess> access;  // of the file being replaced, otherwise that of any new file
    // Complete records of a synced file wait for company: so many bytes at most, and no longer than
    // until a call that comes so much later than the last sync.
    uint64_t wait_nbytes = uint64_t{64} << 20;
    std::chrono::milliseconds wait{1000};
    FileCalls* calls = &FileCalls::system();  // outlives the sink
    bool in_order = false;                    // see RangeSink
  };

  // A new file that takes the name `target` at the first publish(); `target` has its symbolic links
  // resolved and its folder exists. Throws Error(io) where the folder cannot be written.
  static std::shared_ptr<FileSink> replace(const std::string& target, const PathOptions& options);

  // The file at `target`, which the first reserve() cuts to nothing, or a new one that goes away
  // where nothing is published: for names that no other file can take.
  static std::shared_ptr<FileSink> in_place(const std::string& target, const PathOptions& options);

  // Writes into an open file, in place. Takes the descriptor (a duplicate of the caller's).
  static std::shared_ptr<FileSink> overwrite(UniqueFd fd, const std::string& name);

  ~FileSink() override;

  const std::string& name() const noexcept override { return name_; }
  unsigned concurrency() const noexcept override;
  bool one_writer() const noexcept override { return true; }
  bool any_order() const noexcept override { return true; }
  bool in_order() const noexcept override { return options_.in_order; }
  // Whether the new file has the mode that was asked for.
  bool has_mode() const noexcept { return has_mode_; }
  void reserve(uint64_t end) override;
  using RangeSink::write_at;
  void write_at(uint64_t offset, std::span<const ConstBuffer> buffers,
                const std::stop_token& stop) override;
  void relocate(uint64_t from, uint64_t nbytes, uint64_t to, const std::stop_token& stop) override;
  bool relocates_to_new_file() const noexcept override { return !target_.empty(); }
  void undo_relocate() noexcept override;
  void barrier(const std::stop_token& stop) override;
  bool may_wait(uint64_t nbytes) const noexcept override;
  bool in_memory() const noexcept override { return !is_synced(); }
  void publish(uint64_t end, const std::stop_token& stop) override;
  void rollback(uint64_t end) noexcept override;
  void finish(const std::stop_token& stop) override;
  void abandon() noexcept override { close_all(); }

 private:
  FileSink(std::string name, std::string target, const PathOptions& options);

  void close_all() noexcept;
  bool is_synced() const noexcept { return !target_.empty() && options_.fsync; }
  void throw_if_lost() const;
  void open_unnamed();
  void drop_temporary() noexcept;
  void take_name(uint64_t end, const std::stop_token& stop);
  void open_in_place();
  void go_on_in_place(uint64_t end, const std::stop_token& stop);
  void finish_in_place();
  void begin_writeback(uint64_t offset, uint64_t nbytes) const noexcept;
  void relocate_in_place(uint64_t from, uint64_t nbytes, uint64_t to, const std::stop_token& stop);
  void copy_range(int old, uint64_t from, uint64_t nbytes, uint64_t to,
                  const std::stop_token& stop);
  void relocate_to_new_file(uint64_t from, uint64_t nbytes, uint64_t to,
                            const std::stop_token& stop);

  std::string name_;
  std::string target_;     // empty: an open descriptor, no name to take
  std::string temporary_;  // name of the file while it has one; empty for an unnamed file
  OwnerProcess owner_;     // made that name
  PathOptions options_;
  std::string place_;     // the path of a file that is written in place
  bool is_made_ = false;  // it was not there before
  bool has_mode_ = true;
  bool published_ = false;
  UniqueFd fd_;
  bool named_ = false;     // published under target_
  uint64_t extent_ = 0;    // bytes reserved or written
  bool unsynced_ = false;  // the published file may differ from what the disk has
  std::chrono::steady_clock::time_point synced_at_{};
  UniqueFd replaced_;  // the published file, until one that was laid out anew takes its name
  uint64_t replaced_extent_ = 0;
  bool damaged_ = false;  // a move in place failed halfway
  bool lost_ = false;     // a sync failed after the first publish()
};

}  // namespace tensorizer::io
