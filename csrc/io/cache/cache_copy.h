// The copy of an object that one source makes while it is read. Threads of the load copy the bytes
// that come from the network to memory, and a thread of the process writes them (CacheDisk), so
// that no load waits for the disk. When all bytes are written, another thread syncs the file and
// gives it its name.
//
// If the disk fails, or is further behind than CacheDisk has memory for, the copy is given up and
// the reason noted; the load goes on. Safe from many threads.
#pragma once

#include <memory>
#include <span>
#include <stop_token>
#include <string>
#include <utility>
#include <vector>

#include "core/sync.h"
#include "io/buffers.h"
#include "io/byte_ranges.h"
#include "io/cache/cache_folder.h"
#include "io/local/file_sink.h"

namespace tensorizer::io {

// An object, and how much of the disk the cache may take for it.
struct CacheKey {
  std::string location;
  std::string version;
  uint64_t nbytes = 0;
  std::string about;  // for about.json of a new entry; empty: only read, without noting the use
  CacheLimits limits;
};

class CacheCopy : public std::enable_shared_from_this<CacheCopy> {
 public:
  // REQUIRES: entry->begin_copy() was true. The entry is unlocked when the copy is complete or
  // given up, and end() was called. Throws Error(io) if there is no room.
  CacheCopy(std::shared_ptr<CacheFolder> folder, std::shared_ptr<CacheEntry> entry,
            const CacheKey& key, FileCalls& calls = FileCalls::system());

  // Takes bytes while the copy is open. If `patient`, the thread waits for memory, until a stop.
  void add(uint64_t offset, std::span<const Buffer> bytes, bool patient,
           const std::stop_token& stop);
  void show_progress() noexcept { entry_->show_progress(); }
  // The ranges that were not added.
  std::vector<std::pair<uint64_t, uint64_t>> missing() const;
  // Whether it takes bytes.
  bool is_open() const;
  // No bytes follow: an incomplete copy is given up.
  void end() noexcept;
  // Waits until the copy is published or given up. False: a stop.
  bool finish(const std::stop_token& stop);
  bool is_published() const;
  // Its bytes are damaged: gives the copy up, and removes it if it is published.
  void discard(const std::string& why) noexcept;
  // Why the copy was given up; empty if it was not.
  std::string trouble() const;

 private:
  enum class State : uint8_t { open, syncing, published, given_up };

  void write(uint64_t offset, ConstBuffer bytes) noexcept;
  void publish() noexcept;
  void give_up(const std::string& why, bool is_trouble) noexcept;
  void remove(bool force) noexcept;
  std::shared_ptr<FileSink> sink() const;

  const std::shared_ptr<CacheFolder> folder_;
  const std::shared_ptr<CacheEntry> entry_;
  const CacheKey key_;
  mutable Mutex mutex_;
  CondVar changed_;
  State state_ GUARDED_BY(mutex_) = State::open;
  bool has_ended_ GUARDED_BY(mutex_) = false;
  std::shared_ptr<FileSink> sink_ GUARDED_BY(mutex_);  // shared with the job that runs
  ByteRanges added_ GUARDED_BY(mutex_);
  std::string trouble_ GUARDED_BY(mutex_);
};

}  // namespace tensorizer::io
