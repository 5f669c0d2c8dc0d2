// What all workers of one load share: what to load, the plan, and the record headers as they come.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <stop_token>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/turns.h"
#include "device/copy_engine.h"
#include "device/tensor_memory.h"
#include "digest/record_digester.h"
#include "format/record_header.h"
#include "io/range_source.h"
#include "load/key_ring.h"
#include "load/load_plan.h"
#include "load/loaded_headers.h"
#include "load/open_index.h"

namespace tensorizer::load {

// Where one selected tensor goes.
struct LoadTarget {
  uint32_t entry = 0;                // number in the index
  device::TensorMemory destination;  // of entry.data_nbytes at least
  bool in_place = false;             // the bytes are there already (a mapping): check, do not read
};

struct LoadOptions {
  bool verify = false;                   // compare stored hashes, where there are any
  unsigned max_workers = 0;              // 0: as many as are useful
  KeyRing* keys = nullptr;               // set iff the file has crypt_info
  device::CopyEngine* engine = nullptr;  // set iff destinations are on its device
};

struct LoadJob {
  LoadJob(io::RangeSource& from, std::shared_ptr<const OpenedIndex> index,
          std::vector<LoadTarget> to, const LoadOptions& chosen);

  const format::IndexEntry& entry_of(uint32_t target) const noexcept {
    return opened->index[targets[target].entry];
  }

  // Parses the record header of a target, checks it against the index and keeps what is asked for
  // later. What is to be hashed of the record is returned, or announced to the digester where it
  // comes in steps; nullopt: no more to do. The result borrows `bytes`.
  std::optional<digest::RecordStart> accept_header(uint32_t target,
                                                   std::span<const std::byte> bytes,
                                                   format::RecordHeader& header);

  // Calls read(), which reads unit `number`: in the order of the units where the source wants it.
  template <class Read>
  auto in_order(size_t number, const std::stop_token& stop, Read&& read) {
    if (!source.traits().sequential) return read();
    const Turns::Turn turn(reads, number, stop);
    return read();
  }

  // Calls `fn`; an error gets the names of source and tensor.
  template <class Fn>
  void naming(uint32_t target, Fn&& fn) const {
    try {
      fn();
    } catch (const Error& error) {
      rethrow_named(target, error);
    }
  }

  io::RangeSource& source;
  const std::shared_ptr<const OpenedIndex> opened;
  const std::vector<LoadTarget> targets;
  const LoadOptions options;
  LoadPlan plan;
  const std::shared_ptr<LoadedHeaders> headers;
  std::unique_ptr<digest::RecordDigester> digester;  // set iff verifying
  std::atomic<size_t> next_unit{0};
  Turns reads;  // of units, where the source is sequential
  std::atomic<uint64_t> nbytes_done{0};

 private:
  // In a handler.
  [[noreturn]] void rethrow_named(uint32_t target, const Error& error) const;
};

// Prepares job.digester for job.plan.
void start_digests(LoadJob& job, digest::RecordDigester::Use use);

}  // namespace tensorizer::load
