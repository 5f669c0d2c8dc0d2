// A folder that keeps remote objects: DIR/tensorizer-1/<uid>/<location>/<version>/, see CacheEntry
// for the files. Everything below is reached from open descriptors, never through a link, and must
// belong to the user; names that are not of this layout are left alone. Safe from many threads and
// processes.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/unique_fd.h"
#include "io/cache/cache_entry.h"

namespace tensorizer::io {

struct CacheLimits {
  std::optional<uint64_t> max_nbytes;  // that all entries of the user take on the disk
  uint64_t min_free_nbytes = 0;        // that stay free of the file system
};

// What a scan finds.
struct CachedVersion {
  std::string location;
  std::string version;
  uint64_t nbytes = 0;       // of the object
  uint64_t disk_nbytes = 0;  // allocated
  int64_t used = 0;          // nanoseconds since 1970
  bool newest = false;       // of its location
};

class CacheFolder {
 public:
  // Makes missing folders if `create`. Throws Error: not_found (no such folder), io (on a network
  // file system, of another user, writable by other users, a link, no room).
  static std::shared_ptr<CacheFolder> open(const std::string& path, bool create);

  const std::string& path() const noexcept { return path_; }
  // The size of the file system, and its free bytes. Throws Error(io).
  std::pair<uint64_t, uint64_t> disk_nbytes() const;

  // The versions of a location that have a copy, each with its about.json.
  std::vector<std::pair<std::string, std::string>> versions(const std::string& location) const;
  // nullptr if there is no entry; a damaged one is removed. Throws Error(io).
  std::shared_ptr<CacheEntry> open_entry(const std::string& location, const std::string& version,
                                         uint64_t nbytes);
  // The same, but makes a missing entry; nullptr if other processes remove it again and again.
  std::shared_ptr<CacheEntry> make_entry(const std::string& location, const std::string& version,
                                         uint64_t nbytes, const std::string& about);
  // False if a source has it open and `force` is not set.
  bool remove(const std::string& location, const std::string& version, bool force);

  // All entries that have a copy, in the order in which they are to be removed: old versions, then
  // the least recently used.
  std::vector<CachedVersion> scan() const;
  bool is_used(const CachedVersion& version) const;
  // Whether all bytes of an object of this size are there.
  bool has_copy(const std::string& location, const std::string& version, uint64_t nbytes) const;
  // The files of an entry are in this folder.
  std::string path_of(const CachedVersion& version) const;

  // Removes entries that no source has open until `nbytes` more are within the limits. If that
  // cannot be reached, it removes none and returns false. One process at a time.
  bool make_room(uint64_t nbytes, const CacheLimits& limits);
  // Removes the remains of creations and removals that were interrupted an hour ago.
  void sweep();

 private:
  explicit CacheFolder(std::string path) : path_(std::move(path)) {}
  void sweep_location(const std::string& location);
  UniqueFd open_version(const std::string& location, const std::string& version) const;

  const std::string path_;
  UniqueFd user_;  // DIR/tensorizer-1/<uid>
};

}  // namespace tensorizer::io
