// What one source adds to an entry. Bytes that come from the network are copied, and written by a
// thread of the process (CacheDisk), so that no load waits for the disk; where it is slower than
// the network, blocks are left out. Until they are written, readers find them here.
//
// Trouble of the disk ends the storing and is noted, and nothing else. Safe from many threads.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <string>

#include "core/sync.h"
#include "io/cache/cache_disk.h"
#include "io/cache/cache_folder.h"
#include "io/slices.h"

namespace tensorizer::io {

// Which object, and what its cache may take.
struct CacheKey {
  std::string location;
  std::string version;
  uint64_t nbytes = 0;
  std::string about;  // of an entry that is made; empty: this is no use, only a look
  CacheLimits limits;
};

class CacheFilling : public std::enable_shared_from_this<CacheFilling> {
 public:
  static constexpr uint64_t kStepNbytes = uint64_t{256} << 20;  // between two looks at the limits

  CacheFilling(std::shared_ptr<CacheFolder> folder, std::shared_ptr<CacheEntry> entry, CacheKey key)
      : folder_(std::move(folder)), entry_(std::move(entry)), key_(std::move(key)) {}

  CacheEntry& entry() const noexcept { return *entry_; }

  // Keeps the bytes of whole blocks while the storing goes on. False: too many wait to be written,
  // or a stop came before `patient` found room. `claim` ends when they are written.
  bool add(BlockRun run, std::span<const Slice> bytes, CacheEntry::Claim claim, bool patient,
           const std::stop_token& stop);
  // The blocks that wait to be written and that `block` is one of; nullptr: it does not wait.
  struct Waiting;
  std::shared_ptr<const Waiting> waiting_at(uint64_t block);

  // Nothing more is stored. Noted for the log unless it is what the limits are for.
  void stop(const std::string& why, bool is_trouble = true) noexcept;
  // The same, and removes the entry, which others may have open: its bytes are not to be believed.
  // False: it cannot be removed.
  bool discard(const std::string& why, bool is_trouble = true) noexcept;
  // What was handed over is not kept.
  void leave_out(uint64_t nbytes) noexcept { left_out_ += nbytes; }
  bool is_open() const noexcept { return open_.load(std::memory_order_relaxed); }
  // Why nothing more is stored; empty while it is.
  std::string trouble() const;
  uint64_t stored_nbytes() const noexcept { return stored_.load(); }
  uint64_t left_out_nbytes() const noexcept { return left_out_.load(); }

  // Until all that was added is written. False: a stop.
  bool finish(const std::stop_token& stop);
  // What is written would survive a power cut now. False: the disk refused, and the entry is gone.
  bool make_durable() noexcept;
  // The source does not use the entry any more: it is synced when all of it is written.
  void rest() noexcept;

 private:
  void write(Waiting& waiting) noexcept;
  bool has_room(uint64_t nbytes);
  void settle() noexcept;

  const std::shared_ptr<CacheFolder> folder_;
  const std::shared_ptr<CacheEntry> entry_;
  const CacheKey key_;
  std::atomic<bool> open_{true};
  std::atomic<uint64_t> stored_{0};
  std::atomic<uint64_t> left_out_{0};
  mutable Mutex mutex_;
  CondVar written_;
  std::map<uint64_t, std::shared_ptr<Waiting>> waiting_ GUARDED_BY(mutex_);  // by its last block
  std::string trouble_ GUARDED_BY(mutex_);
};

struct CacheFilling::Waiting {
  BlockRun run;
  CacheDisk::Buffer bytes;
  uint64_t nbytes;
  CacheEntry::Claim claim;

  ConstSlice all() const noexcept { return {bytes.get(), static_cast<size_t>(nbytes)}; }
};

}  // namespace tensorizer::io
