// Runs a load: workers take units from one queue; within a worker a piece goes read, decrypt,
// digest, place.
//
// A session is used by one thread, once; run() returns only when no worker can touch a destination
// any more. After a failure of an encrypted load whatever it put into its destinations has been
// wiped, on a device as far as it still takes orders.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <stop_token>
#include <vector>

#include "core/chain_queue.h"
#include "core/sync.h"
#include "device/copy_engine.h"
#include "device/destination.h"
#include "format/record_header.h"
#include "io/range_source.h"
#include "load/key_ring.h"
#include "load/load_plan.h"
#include "load/open_index.h"

namespace tensorizer::load {

// Where one selected tensor goes.
struct LoadTarget {
  uint32_t entry = 0;  // number in the index
  device::Destination
      destination;        // at least entry.data_nbytes on the host, loaded_nbytes on a device
  bool in_place = false;  // the bytes are there already (a mapping): check, do not read
};

struct LoadOptions {
  bool verify = false;       // compare stored hashes, where there are any, with the data
  unsigned max_workers = 0;  // 0: as many as are useful
  KeyRing* keys = nullptr;   // set iff the file has crypt_info
  device::CopyEngine* engine = nullptr;  // set iff destinations are on its device
};

// The record headers of the selection, as read; borrowed by what is derived from them. In a
// container without record headers: what its index says.
struct LoadedHeaders {
  std::vector<std::byte> bytes;
  std::vector<uint64_t> begins;               // per target, into bytes
  std::vector<format::RecordHeader> headers;  // per target; borrow `bytes`, or `index`
  std::shared_ptr<const OpenedIndex> index;   // set where the headers borrow it
  std::span<const std::byte> bytes_of(size_t target) const noexcept {
    const uint64_t end = target + 1 < begins.size() ? begins[target + 1] : bytes.size();
    return std::span(bytes).subspan(begins[target], end - begins[target]);
  }
};

class LoadSession {
 public:
  // `targets` in ascending order of entry. Throws Error(malformed) if the headers cannot all be
  // held.
  LoadSession(io::RangeSource& source, std::shared_ptr<const OpenedIndex> opened,
              std::vector<LoadTarget> targets, const LoadOptions& options);
  ~LoadSession();

  // True when run() takes a few milliseconds at most.
  bool is_brief() const noexcept { return brief_; }

  // Loads everything or throws: malformed, truncated, hash_mismatch, crypto, io, device, cancelled.
  void run(const std::stop_token& stop);

  // Payload bytes placed so far; readable while run() works.
  uint64_t nbytes_done() const noexcept { return nbytes_done_.load(std::memory_order_relaxed); }
  std::shared_ptr<const LoadedHeaders> headers() const noexcept { return headers_; }

 private:
  struct TargetState;
  class Worker;

  void make_plan();
  void take_headers_from_index();
  void run_workers(const std::stop_token& stop);
  void wipe_destinations() noexcept;
  bool plan_has_many_steps(uint32_t target) const noexcept;
  const format::IndexEntry& entry_of(uint32_t target) const noexcept {
    return opened_->index[targets_[target].entry];
  }
  bool has_crypt_info() const noexcept { return opened_->prologue.has_crypt_info(); }

  io::RangeSource& source_;
  std::shared_ptr<const OpenedIndex> opened_;
  std::vector<LoadTarget> targets_;
  LoadOptions options_;
  LoadPlan plan_;
  bool brief_ = false;
  std::shared_ptr<LoadedHeaders> headers_ = std::make_shared<LoadedHeaders>();
  std::vector<TargetState> states_;
  std::vector<uint32_t> segment_crcs_;   // per segment, when verifying
  std::vector<uint32_t> step_segments_;  // payload steps of all targets -> segment, when verifying
  std::unique_ptr<ChainQueue> chains_;   // host destinations, when verifying
  std::atomic<uint32_t> next_unit_{0};
  std::atomic<uint64_t> nbytes_done_{0};
  // Later units of a tensor wait here for its record header, and on a device for their turn to be
  // hashed.
  Mutex order_mutex_;
  CondVar order_changed_;
};

}  // namespace tensorizer::load
