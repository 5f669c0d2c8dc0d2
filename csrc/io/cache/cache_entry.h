// The files of one version of one object in a cache: `data`, which is complete or absent,
// `about.json`, which only Python reads, and `lock`, which holds nothing.
//
// Locks (of open file descriptions, so they end with their process) on the first byte of `lock`
// keep open entries from being removed; one on its second byte is held by the one that makes the
// copy, which dates the file while bytes arrive. Right bytes do not depend on them. Safe from many
// threads.
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
  // nullptr: damaged, or being removed. Throws Error(io) where the files cannot be opened or
  // locked.
  static std::shared_ptr<CacheEntry> open(UniqueFd folder, uint64_t nbytes);
  // Whether somebody has the entry open.
  static bool is_used(int folder) noexcept;
  // The same as a lock: holds it until `lock` is closed; false where somebody has the entry open.
  static bool take_for_removal(int lock) noexcept;
  // Whether a folder has all bytes of an object of this size.
  static bool has_copy(int folder, uint64_t nbytes) noexcept;

  // Gives the locks back by a call: a child that was forked meanwhile has the descriptor, too.
  ~CacheEntry();
  CacheEntry(const CacheEntry&) = delete;
  CacheEntry& operator=(const CacheEntry&) = delete;

  // A descriptor of `data`; empty: it is not there. Throws Error(io).
  UniqueFd open_copy() const;
  // Whether the caller is the one that makes the copy from now on, until end_copy().
  bool begin_copy();
  void end_copy() noexcept;
  // The one that makes the copy says that bytes arrive, at most a few times a second.
  void show_progress() noexcept;
  // Changes with each of these.
  int64_t last_progress() const noexcept;

  // What was noted last as confirmed or used; rewritten whole. Throws nothing: it is a hint.
  void write_about(const std::string& about) noexcept;
  // Notes the use, once a minute.
  void touch() noexcept;
  // Others may remove the entry from now on; open descriptors go on.
  void unlock() noexcept;

 private:
  CacheEntry() = default;

  UniqueFd folder_, lock_;
  const OwnerProcess owner_;
};

}  // namespace tensorizer::io
