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
#include "io/local/file_calls.h"
#include "io/slices.h"

namespace tensorizer::io {

inline constexpr uint64_t kCacheBlockNbytes = uint64_t{256} << 10;
inline constexpr uint64_t kCacheHeadNbytes = 64;

// Blocks [begin, end).
struct BlockRun {
  uint64_t begin = 0;
  uint64_t end = 0;
};

class CacheEntry : public std::enable_shared_from_this<CacheEntry> {
 public:
  // Writes the files of an entry without content into a new folder. Throws Error(io).
  static void create_files(int folder, uint64_t nbytes, const std::string& about);
  // nullptr: damaged, or being removed. Throws Error(io) where the files cannot be opened, locked
  // or mapped. `calls` write and sync `data`.
  static std::shared_ptr<CacheEntry> open(UniqueFd folder, uint64_t nbytes,
                                          FileCalls& calls = FileCalls::system());
  // The mark of use alone: whether somebody has the entry open.
  static bool is_used(int folder) noexcept;
  // The same as a lock: holds it until `map` is closed; false where somebody has the entry open.
  static bool take_for_removal(int map) noexcept;
  // Bytes of the object that an opening would find, by a `map` that is not open; 0: it is damaged.
  static uint64_t present_nbytes_of(int folder, uint64_t nbytes);
  static uint64_t blocks_of(uint64_t nbytes) noexcept;
  static uint64_t map_nbytes_of(uint64_t nbytes) noexcept;

  ~CacheEntry();
  CacheEntry(const CacheEntry&) = delete;
  CacheEntry& operator=(const CacheEntry&) = delete;

  uint64_t nbytes() const noexcept { return nbytes_; }
  uint64_t blocks() const noexcept { return blocks_of(nbytes_); }
  int data() const noexcept { return data_.get(); }
  bool belongs_to_this_process() const noexcept;

  // The blocks that `run`, which is not empty, begins with and that are all present, or all missing
  // when they are looked at, once each.
  struct Same {
    BlockRun run;
    bool present;
  };
  Same first_same(BlockRun run) const noexcept;
  bool has(BlockRun run) const noexcept;
  // Writes the bytes of whole blocks; `end` is the first that is not present after that. 0, or
  // errno.
  int write(BlockRun run, ConstSlice bytes, uint64_t& end) noexcept;
  uint64_t present_nbytes() const noexcept;
  bool is_complete() const noexcept { return present_nbytes() == nbytes_; }
  // What was noted last as confirmed or used; rewritten whole. Throws nothing: it is a hint.
  void write_about(const std::string& about) noexcept;
  // Notes the use, once a minute.
  void touch() noexcept;

  // Blocks that nobody else fetches, until it is destroyed.
  class Claim {
   public:
    Claim() = default;
    Claim(std::shared_ptr<CacheEntry> entry, BlockRun run) : entry_(std::move(entry)), run_(run) {}
    Claim(Claim&& other) noexcept = default;
    Claim& operator=(Claim&& other) noexcept {
      std::swap(entry_, other.entry_);
      std::swap(run_, other.run_);
      return *this;
    }
    ~Claim() {
      if (entry_) entry_->release(run_);
    }

   private:
    std::shared_ptr<CacheEntry> entry_;
    BlockRun run_;
  };
  enum class Owner : uint8_t { caller, threads, processes };
  struct Claimed {
    Owner owner;
    BlockRun run;  // the blocks that this is true for
    Claim claim;   // of the caller
  };
  // Tries to become the one who fetches some blocks from `run.begin` on, without waiting.
  Claimed claim(BlockRun run);
  // Until a thread of this process has brought something or given it up, the time is over, or a
  // stop.
  void wait(std::chrono::milliseconds time, const std::stop_token& stop);
  void wake() noexcept;

  // Sets the durable bits of what is present now. 0, or errno: then the system may have dropped
  // what it could not write, and only what was durable before is present.
  int make_durable() noexcept;
  // Whether blocks are present that are not durable and that nobody was told of before.
  bool take_unsynced() noexcept;
  // Others may remove the entry from now on; open descriptors go on.
  void leave() noexcept;

 private:
  explicit CacheEntry(FileCalls& calls) : calls_(calls) {}
  void release(BlockRun run) noexcept;
  bool is_present(uint64_t block) const noexcept;
  bool take_map(uint64_t nbytes);
  bool renew_boot(const std::string& boot);
  std::atomic<uint8_t>* present() const noexcept;
  std::atomic<uint8_t>* durable() const noexcept;

  FileCalls& calls_;
  int64_t process_ = 0;
  uint64_t nbytes_ = 0;
  UniqueFd folder_, data_, map_;
  std::atomic<bool> unsynced_{true};
  std::byte* bytes_ = nullptr;  // of the mapping of `map`
  size_t map_nbytes_ = 0;
  Mutex mutex_;
  CondVar changed_;
  uint64_t wakes_ GUARDED_BY(mutex_) = 0;
  std::map<uint64_t, uint64_t> claims_ GUARDED_BY(mutex_);  // begin to end
};

}  // namespace tensorizer::io
