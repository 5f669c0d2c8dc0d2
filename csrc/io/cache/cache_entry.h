// The files of one version of one object in a cache: `data`, as sparse as what is known of it,
// `map`, one bit per block that is there, and `about.json`, which only Python reads.
//
// A bit of `present` is set after all bytes of its block were written, and read with acquire, so
// whoever sees it finds the bytes, in this process and in others of the machine. A bit of `durable`
// is set after an fdatasync that began after that; whoever opens an entry of an earlier boot of the
// machine believes only those. Locks (of open file descriptions, so they end with their process)
// save work and keep open entries from being removed; right bytes do not depend on them. Safe from
// many threads; a forked child opens the entry anew.
//
// map, little-endian: "TZRCMAP1", u64 size of the object, u32 block size, u32 0, boot id (36 bytes
// of text, or zeros), 4 zero bytes, `present`, `durable`: one bit per block each, lowest first.
#pragma once

#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <span>
#include <stop_token>
#include <string>

#include "core/sync.h"
#include "core/unique_fd.h"

namespace tensorizer::io {

inline constexpr uint64_t kCacheBlockNbytes = uint64_t{256} << 10;
inline constexpr uint64_t kCacheHeadNbytes = 64;

// Blocks [begin, end).
struct BlockRun {
  uint64_t begin = 0;
  uint64_t end = 0;
};

class CacheEntry {
 public:
  // Writes the files of an entry without content into a new folder. Throws Error(io).
  static void create_files(int folder, uint64_t nbytes, const std::string& about);
  // nullptr: damaged, or being removed. Throws Error(io) where locks or mappings do not work.
  static std::shared_ptr<CacheEntry> open(UniqueFd folder, uint64_t nbytes);
  // The mark of use alone: whether somebody has the entry open.
  static bool is_used(int folder) noexcept;
  // The same as a lock: holds it until `map` is closed; false where somebody has the entry open.
  static bool take_for_removal(int map) noexcept;
  // Bytes of the object that are present, by a `map` that is not open; 0 where it is damaged.
  static uint64_t present_nbytes_of(int folder, uint64_t nbytes);
  static uint64_t blocks_of(uint64_t nbytes) noexcept;

  ~CacheEntry();
  CacheEntry(const CacheEntry&) = delete;
  CacheEntry& operator=(const CacheEntry&) = delete;

  uint64_t nbytes() const noexcept { return nbytes_; }
  uint64_t blocks() const noexcept { return blocks_of(nbytes_); }
  int data() const noexcept { return data_.get(); }
  bool belongs_to_this_process() const noexcept;

  bool is_present(uint64_t block) const noexcept;
  void set_present(BlockRun run) noexcept;
  // The first block of [begin, end) of the other kind than `begin`.
  uint64_t end_of_same(uint64_t begin, uint64_t end) const noexcept;
  uint64_t present_nbytes() const noexcept;
  bool is_complete() const noexcept { return present_nbytes() == nbytes_; }
  // What was noted last as confirmed or used; rewritten whole. Throws nothing: it is a hint.
  void write_about(const std::string& about) noexcept;
  // Notes the use, once a minute.
  void touch() noexcept;

  enum class Claim : uint8_t { mine, threads, processes };
  struct Claimed {
    Claim whose;
    uint64_t end;  // of the blocks that this is true for
  };
  // Tries to become the one who fetches some blocks from `run.begin` on, without waiting.
  Claimed claim(BlockRun run);
  void release(BlockRun run) noexcept;
  // Until a thread of this process gives something back, the time is over, or a stop.
  void wait(std::chrono::milliseconds time, const std::stop_token& stop);

  // Sets the durable bits of what is present now. False: the disk refused.
  bool make_durable() noexcept;
  // Whether blocks are present that are not durable and that nobody was told of before.
  bool take_unsynced() noexcept;
  // Others may remove the entry from now on; open descriptors go on.
  void leave() noexcept;

 private:
  CacheEntry() = default;
  bool take_map(uint64_t nbytes);
  bool renew_boot(const std::string& boot);
  std::atomic<uint8_t>* present() const noexcept;
  std::atomic<uint8_t>* durable() const noexcept;

  int64_t process_ = 0;
  uint64_t nbytes_ = 0;
  UniqueFd folder_, data_, map_;
  std::atomic<bool> unsynced_{true};
  std::byte* bytes_ = nullptr;  // of the mapping of `map`
  size_t map_nbytes_ = 0;
  Mutex mutex_;
  CondVar released_;
  uint64_t releases_ GUARDED_BY(mutex_) = 0;
  std::map<uint64_t, uint64_t> claims_ GUARDED_BY(mutex_);  // begin to end
};

}  // namespace tensorizer::io
