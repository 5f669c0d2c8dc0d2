// An object of the network over a copy of it on the disk: what is there is read from there, what is
// not comes from the network and is kept on its way.
//
// Blocks that are missing are fetched whole, by one reader at a time: a thread, or another process,
// that wants the same ones waits for them. Keeping never delays and never fails a load
// (CacheFilling). What is read is never hashed here. Safe from many threads; a forked child goes on
// with locks of its own.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "core/sync.h"
#include "io/cache/cache_filling.h"
#include "io/local/file_source.h"
#include "io/range_source.h"

namespace tensorizer::io {

class CacheSource final : public RangeSource {
 public:
  // With `network`, an entry is made where there is none and the limits allow one; nullptr where
  // they do not. Without it, what is there is all there is; nullptr where there is no entry. Throws
  // Error(io) where the folder cannot be used, or takes descriptors that connections need.
  static std::shared_ptr<CacheSource> open(std::shared_ptr<CacheFolder> folder, CacheKey key,
                                           std::shared_ptr<RangeSource> network, std::string name);
  ~CacheSource() override;

  const std::string& name() const noexcept override { return name_; }
  std::optional<uint64_t> size() const override { return key_.nbytes; }
  SourceTraits traits() const override;
  using RangeSource::read_at;
  void read_at(uint64_t offset, std::span<const Slice> slices,
               const std::stop_token& stop) override;
  const std::byte* view(uint64_t offset, uint64_t nbytes) noexcept override;
  bool drop_copy() noexcept override;
  void close() noexcept override;
  uint64_t bytes_read() const noexcept override;

  // Fetches all that is missing, waiting for the disk, until it would survive a power cut. Throws
  // Error: io (also where the disk or the limits do not allow it), cancelled.
  void fill(const std::stop_token& stop);
  // The entry is not in use any more, though later reads go on.
  void rest() noexcept;
  void write_about(const std::string& about);

  const CacheKey& key() const noexcept { return key_; }
  // Whether everything was there at the opening.
  bool was_complete() const noexcept { return was_complete_; }
  uint64_t present_nbytes() const;
  bool is_present(uint64_t offset, uint64_t nbytes) const;
  uint64_t cached_nbytes_read() const noexcept { return from_disk_.load(); }
  // What was handed over to be stored, or not; all of it once nothing waits to be written.
  uint64_t stored_nbytes() const;
  uint64_t left_out_nbytes() const;
  // Why nothing more is kept; empty while it is.
  std::string trouble() const;

 private:
  struct Request;

  CacheSource(std::shared_ptr<CacheFolder> folder, CacheKey key,
              std::shared_ptr<RangeSource> network, std::string name);
  void use(std::shared_ptr<CacheEntry> entry);
  // nullptr: there is no entry any more.
  std::shared_ptr<CacheFilling> filling() const;
  std::shared_ptr<FileSource> disk() const;
  void store_head();
  void read_in_order(const Request& request, const std::stop_token& stop);
  // Reads what of `run` can be read without waiting for others; what is left goes to `left`. True
  // where a thread of this process fetches some of that.
  bool read_run(const std::shared_ptr<CacheFilling>& filling, const Request& request, BlockRun run,
                bool is_late, std::vector<BlockRun>& left, const std::stop_token& stop);
  // False: the disk does not give it.
  bool read_present(CacheFilling& filling, const Request& request, BlockRun run,
                    const std::stop_token& stop);
  void fetch(CacheFilling& filling, const Request& request, BlockRun run, CacheEntry::Claim claim,
             const std::stop_token& stop);
  void read_network(const Request& request, BlockRun run, const std::stop_token& stop);
  void note_fetched(BlockRun run) noexcept;
  // Keeps the bytes of whole blocks that this object has fetched, or leaves them out.
  void store(CacheFilling& filling, BlockRun run, std::span<const Slice> bytes,
             CacheEntry::Claim claim, const std::stop_token& stop);
  void absorb(CacheFilling& filling, uint64_t offset, std::span<const Slice> slices,
              const std::stop_token& stop);

  const std::shared_ptr<CacheFolder> folder_;
  const CacheKey key_;
  const std::shared_ptr<RangeSource> network_;  // nullptr: offline
  const std::string name_;
  bool was_complete_ = false;
  bool patient_ = false;

  std::atomic<uint64_t> from_disk_{0};         // what this object has fetched itself left out
  std::vector<std::atomic<uint8_t>> fetched_;  // one bit per block: by this object
  mutable Mutex mutex_;
  mutable std::shared_ptr<CacheFilling> filling_ GUARDED_BY(mutex_);
  bool is_lost_ GUARDED_BY(mutex_) = false;  // the entry was removed, or this is closed
  std::shared_ptr<FileSource> disk_ GUARDED_BY(mutex_);
  // Of a network source that is read in one pass: the beginning of a block that is not whole yet.
  Mutex carry_mutex_;
  uint64_t carry_at_ GUARDED_BY(carry_mutex_) = 0;
  std::vector<std::byte> carry_ GUARDED_BY(carry_mutex_);
};

}  // namespace tensorizer::io
