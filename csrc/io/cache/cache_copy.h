// The copy of an object that one source makes while it is read. Bytes that come from the network
// are copied to memory, and a thread of the process writes them (CacheDisk), so that no load waits
// for the disk. When all are written, another thread syncs the file, and it takes its name.
//
// A disk that fails, or that is further behind than CacheDisk has memory for, ends the copy; that
// is noted, and nothing else happens to the load. Safe from many threads.
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

// Which object, and what its cache may take.
struct CacheKey {
  std::string location;
  std::string version;
  uint64_t nbytes = 0;
  std::string about;  // of an entry that is made; empty: this is no use, only a look
  CacheLimits limits;
};

class CacheCopy : public std::enable_shared_from_this<CacheCopy> {
 public:
  // REQUIRES: entry->begin_copy() was true. The entry is left when the copy is there, or given up,
  // and end() was called. Throws Error(io) where there is no room.
  CacheCopy(std::shared_ptr<CacheFolder> folder, std::shared_ptr<CacheEntry> entry,
            const CacheKey& key, FileCalls& calls = FileCalls::system());

  // Takes bytes while the copy goes on. `patient` waits for memory, until a stop.
  void add(uint64_t offset, std::span<const Buffer> bytes, bool patient,
           const std::stop_token& stop);
  void show_progress() noexcept { entry_->show_progress(); }
  // The ranges that were not added.
  std::vector<std::pair<uint64_t, uint64_t>> missing() const;
  // Whether it takes bytes.
  bool is_open() const;
  // Nothing more is added: what is not whole is given up.
  void end() noexcept;
  // Until it is there or was given up. False: a stop.
  bool finish(const std::stop_token& stop);
  bool is_published() const;
  // Its bytes are not to be believed: it goes, if it is there already.
  void discard(const std::string& why) noexcept;
  // Why there is none; empty: there is one, or will be.
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
  std::shared_ptr<FileSink> sink_ GUARDED_BY(mutex_);  // a job that runs has it, too
  ByteRanges added_ GUARDED_BY(mutex_);
  std::string trouble_ GUARDED_BY(mutex_);
};

}  // namespace tensorizer::io
