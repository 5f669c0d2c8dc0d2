// A load of whole tensors, or of parts of them, from one source to one device, as plain data: what
// to load, its plan, and the record headers as they come. session_plan.h plans it;
// concurrent_loads.h runs it, alone or with others, once.
//
// After a failure of an encrypted load whatever it put into its destinations has been wiped, on a
// device as far as it still takes orders. Parts come together in contiguous destinations; of
// encrypted files whole chunks are opened, so that a part is as authentic as the whole.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <stop_token>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/sync.h"
#include "core/turns.h"
#include "device/copy_engine.h"
#include "digest/record_digester.h"
#include "format/record_header.h"
#include "io/range_source.h"
#include "load/allocate.h"
#include "load/key_ring.h"
#include "load/load_plan.h"
#include "load/loaded_headers.h"
#include "load/open_index.h"
#include "load/payload_cipher.h"

namespace tensorizer::load {

// What a load is asked for.
struct LoadOptions {
  bool verify = false;                   // compare stored hashes, where there are any; no parts
  unsigned max_workers = 0;              // 0: as many as are useful
  KeyRing* keys = nullptr;               // set iff the file has crypt_info
  device::CopyEngine* engine = nullptr;  // set iff destinations are on its device
  // Targets are parts of tensors, in any order, overlapping or not. A part has no stored hash, so
  // record headers are read of encrypted files alone, for their keys and MACs.
  bool parts = false;
  // Bytes between two ranges of parts that are read rather than skipped; nullopt: as the source
  // likes it.
  std::optional<uint64_t> gap_nbytes{};
  // What a worker asks a source over a network for at a time, at most; 0: as the source likes it.
  uint64_t request_nbytes = 0;
};

// Records are numbered as the targets, or, of parts, in the order of the file, each once.
struct LoadSession {
  // Whole tensors in ascending order of entry. Throws Error: malformed for sizes and headers that
  // no file has; crypto where there is no key.
  LoadSession(io::RangeSource& from, std::shared_ptr<const OpenedIndex> index,
              std::vector<LoadTarget> to, const LoadOptions& chosen);

  const format::IndexEntry& entry_of(uint32_t record) const noexcept {
    return opened->index[entries[record]];
  }
  uint32_t record_of(uint32_t target) const noexcept {
    return options.parts ? records[target] : target;
  }
  bool has_crypt_info() const noexcept { return opened->prologue.has_crypt_info(); }
  bool reads_headers() const noexcept {
    return opened->has_record_headers() && (!options.parts || has_crypt_info());
  }

  // A record header becomes fields: parsed, checked against the index, given to the cipher, and
  // kept as far as it is asked for later. What is to be hashed of the record is returned, or
  // announced to the digester where it comes in steps; nullopt: no more to do. The result borrows
  // `bytes`.
  std::optional<digest::RecordStart> accept_header(uint32_t record,
                                                   std::span<const std::byte> bytes);

  // Returns when the header of a record whose payload comes in steps was accepted: it may lie in an
  // earlier unit, which another worker is reading.
  void wait_for_header(uint32_t record, const std::stop_token& stop);

  // Calls read(), which reads unit `number`: in the order of the units where the source wants it.
  template <class Read>
  auto in_order(size_t number, const std::stop_token& stop, Read&& read) {
    if (!source.traits().sequential) return read();
    const Turns::Turn turn(*reads, number, stop);
    const MutexLock lock(out_of_order);
    return read();
  }

  // Calls `fn`; an error gets the names of source and tensor.
  template <class Fn>
  void naming(uint32_t record, Fn&& fn) const {
    try {
      fn();
    } catch (const Error& error) {
      rethrow_named(record, error);
    }
  }

  // The destinations are allocated while it runs, on the thread that waits for it. REQUIRES: an
  // engine; whole tensors.
  void allocate_while_it_runs(std::vector<MemoryGroup> to_allocate, MemoryMaker maker);
  // All of it now; the engine is to be ordered after it.
  void allocate_now();
  void allocate_group(size_t group);
  // The targets of these groups have their destinations, and the engine is ordered after them.
  void memory_is_ready(std::span<const size_t> of_groups);
  bool has_memory(uint32_t target) const noexcept {
    return ready_.empty() || ready_[target].load(std::memory_order_acquire);
  }
  void wait_for_memory(uint32_t target, const std::stop_token& stop);

  // How far a unit of the plan has come: begun; something may be in its destinations.
  enum class Progress : uint8_t { none, begun, placed };
  void note(size_t unit, Progress progress) noexcept {
    progress_[unit].store(progress, std::memory_order_relaxed);
  }
  Progress progress_of(size_t unit) const noexcept {
    return progress_[unit].load(std::memory_order_relaxed);
  }
  // Whether something may be in the destinations of any unit.
  bool has_placed() const noexcept {
    return std::ranges::any_of(progress_,
                               [](const auto& unit) { return unit.load() == Progress::placed; });
  }
  // Before the workers begin.
  void forget_progress();

  io::RangeSource& source;
  const std::shared_ptr<const OpenedIndex> opened;
  std::vector<LoadTarget> targets;
  LoadOptions options;
  std::vector<uint32_t> records;  // per part
  std::vector<uint32_t> entries;  // per record
  LoadPlan plan;
  const std::shared_ptr<LoadedHeaders> headers;
  const std::unique_ptr<PayloadCipher> cipher;       // set iff the file has crypt_info
  std::unique_ptr<digest::RecordDigester> digester;  // set iff verifying
  std::unique_ptr<Turns> reads;  // of the plan's units, where the source is sequential
  Mutex out_of_order;            // held by reads of a sequential source, which may not overlap
  unsigned read_buffers = 1;     // of a worker, where the source waits and there is an engine
  std::atomic<uint64_t> nbytes_done{0};  // placed so far; readable while the workers run
  bool is_brief = false;  // it takes a few milliseconds at most, once its destinations are there
  unsigned plans_begun = 0;
  std::vector<MemoryGroup> groups;  // not allocated when it begins
  MemoryMaker memory;

 private:
  // In a handler.
  [[noreturn]] void rethrow_named(uint32_t record, const Error& error) const;

  std::vector<std::atomic<bool>> accepted_;      // per record
  std::vector<std::atomic<bool>> ready_;         // per target; empty: all are
  std::vector<std::atomic<Progress>> progress_;  // per unit
  Mutex mutex_;
  CondVar changed_;
};

}  // namespace tensorizer::load
