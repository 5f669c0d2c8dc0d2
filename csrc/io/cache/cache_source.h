// An object of the network over its copy on the disk. If there is a copy, the source reads it, and
// the network only if the disk fails. Otherwise bytes come from the network, and a load of the
// whole object makes a copy on the way (CacheCopy). If another source, of this process or another
// one, is making that copy, a load of the whole object waits for it and reads the copy. A load of
// parts neither waits nor makes a copy.
//
// The bytes are not hashed here. Safe from many threads; a forked child reads, and makes no copy.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <string>

#include "core/fork.h"
#include "core/sync.h"
#include "io/cache/cache_copy.h"
#include "io/local/file_source.h"
#include "io/range_source.h"

namespace tensorizer::io {

class CacheSource final : public RangeSource {
 public:
  // Without `network`, only the copy is read, and the result is nullptr if there is no copy. Throws
  // Error(io) if the folder cannot be used, and with `network` as check_descriptors().
  static std::shared_ptr<CacheSource> open(std::shared_ptr<CacheFolder> folder, CacheKey key,
                                           std::shared_ptr<RangeSource> network, std::string name);
  // Throws Error(io) if an entry would take descriptors that connections need.
  static void check_descriptors();
  ~CacheSource() override;

  const std::string& name() const noexcept override { return name_; }
  std::optional<uint64_t> size() const override { return key_.nbytes; }
  SourceTraits traits() const override;
  using RangeSource::read_at;
  void read_at(uint64_t offset, std::span<const Buffer> buffers,
               const std::stop_token& stop) override;
  // Begins a load of the whole object: the callers are streams, which usually read all of it.
  uint64_t read_up_to(uint64_t offset, Buffer into, const std::stop_token& stop) override;
  void begin_load(uint64_t nbytes, const std::stop_token& stop) override;
  const std::byte* view(uint64_t offset, uint64_t nbytes) noexcept override;
  bool drop_copy() noexcept override;
  void close() noexcept override;
  uint64_t bytes_read() const noexcept override;

  // Makes the copy at the pace of the disk, and returns when it would survive a power cut. Throws
  // Error: io (also if the disk or the limits do not allow it), cancelled.
  void fill(const std::stop_token& stop);
  // No load follows: completes a copy that lacks little, and unlocks the entry, which may be
  // removed from then on. Reads stay possible.
  void release() noexcept;
  void write_about(const std::string& about) noexcept;

  const CacheKey& key() const noexcept { return key_; }
  // Whether there was a copy at the opening.
  bool was_complete() const noexcept { return was_complete_; }
  uint64_t cached_nbytes_read() const noexcept { return from_disk_.load(); }
  // The size of the object if this source has made, or is making, its copy; else 0.
  uint64_t stored_nbytes() const;
  // Why this source makes no copy; empty if it makes one, or was not asked to.
  std::string trouble() const;

 private:
  CacheSource(std::shared_ptr<CacheFolder> folder, CacheKey key,
              std::shared_ptr<RangeSource> network, std::string name);
  void use(std::shared_ptr<CacheEntry> entry, UniqueFd copy);
  // `patience`: how long to wait for another source that makes the copy, after its last byte.
  void begin_load(std::chrono::milliseconds patience, const std::stop_token& stop);
  void begin_copy(std::chrono::milliseconds patience, const std::stop_token& stop);
  bool wait_for_turn(CacheEntry& entry, std::chrono::milliseconds patience,
                     const std::stop_token& stop);
  void add_head(CacheCopy& copy, const std::stop_token& stop);
  void complete(CacheCopy& copy);
  void make_none(const std::string& why);
  std::shared_ptr<FileSource> disk() const;
  std::shared_ptr<CacheCopy> copy() const;
  bool read_disk(FileSource& disk, uint64_t offset, std::span<const Buffer> buffers,
                 const std::stop_token& stop);

  const std::shared_ptr<CacheFolder> folder_;
  const CacheKey key_;
  const std::shared_ptr<RangeSource> network_;  // nullptr: offline
  const std::string name_;
  const OwnerProcess owner_;
  bool was_complete_ = false;
  std::atomic<bool> has_begun_{false};  // a load of the whole object
  std::atomic<bool> patient_{false};
  std::atomic<uint64_t> from_disk_{0};
  mutable Mutex mutex_;
  CondVar changed_;
  std::shared_ptr<CacheEntry> entry_ GUARDED_BY(mutex_);  // of `disk_`
  std::shared_ptr<FileSource> disk_ GUARDED_BY(mutex_);
  std::shared_ptr<CacheCopy> copy_ GUARDED_BY(mutex_);
  std::string trouble_ GUARDED_BY(mutex_);
};

}  // namespace tensorizer::io
