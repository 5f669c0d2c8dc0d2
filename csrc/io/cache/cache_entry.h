// The files of one version of one object in a cache: `data`, which is complete or absent,
// `about.json`, which only Python reads, and `lock`, which holds nothing.
//
// Locks (of open file descriptions, so they end with their process) on the first byte of `lock`
// keep open entries from being removed. The source that makes the copy holds a lock on the second
// byte, and dates the file while bytes arrive. Bytes are right without these locks, too. Safe from
// many threads.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "core/fork.h"
#include "core/unique_fd.h"

namespace tensorizer::io {

class CacheEntry {
 public:
  // Writes the files of an entry without a copy into a new folder. Throws Error(io).
  static void create_files(int folder, const std::string& about);
  // nullptr if it is damaged or being removed. Throws Error(io) if the files cannot be opened or
  // locked.
  static std::shared_ptr<CacheEntry> open(UniqueFd folder, uint64_t nbytes);
  // Whether a source, of any process, has the entry open.
  static bool is_used(int folder) noexcept;
  // Locks an entry for its removal until `lock` is closed; false if a source has it open.
  static bool take_for_removal(int lock) noexcept;
  // Whether a folder has all bytes of an object of this size.
  static bool has_copy(int folder, uint64_t nbytes) noexcept;

  // Unlocks explicitly, because a child that was forked meanwhile has the descriptor, too.
  ~CacheEntry();
  CacheEntry(const CacheEntry&) = delete;
  CacheEntry& operator=(const CacheEntry&) = delete;

  // A descriptor of `data`; empty if there is no copy. Throws Error(io).
  UniqueFd open_copy() const;
  // True: the caller makes the copy from now on, until end_copy(). False: another source does.
  bool begin_copy();
  void end_copy() noexcept;
  // Dates the file, at most a few times a second: bytes arrive at the caller, which makes the copy.
  void show_progress() noexcept;
  // The date that show_progress() has set.
  int64_t last_progress() const noexcept;

  // Replaces about.json. An error does no harm and is ignored.
  void write_about(const std::string& about) noexcept;
  // Notes the time of use, once a minute.
  void touch() noexcept;
  // Other sources may remove the entry from now on; open descriptors stay valid.
  void unlock() noexcept;

 private:
  CacheEntry() = default;

  UniqueFd folder_, lock_;
  const OwnerProcess owner_;
};

}  // namespace tensorizer::io
