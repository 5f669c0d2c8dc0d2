// Runs a load of whole tensors, or of parts of them: plans it, gives its units to workers, and
// wipes what an encrypted load left behind when it failed.
//
// A session is used by one thread, once; run() returns only when no worker can touch a destination
// any more. After a failure of an encrypted load whatever it put into its destinations has been
// wiped, on a device as far as it still takes orders. Parts come together in contiguous
// destinations; of encrypted files whole chunks are opened, so that a part is as authentic as the
// whole.
#pragma once

#include <cstdint>
#include <memory>
#include <stop_token>
#include <vector>

#include "load/load_job.h"

namespace tensorizer::load {

class LoadSession {
 public:
  // Whole tensors in ascending order of entry. Throws Error: malformed for sizes and headers that
  // no file has; crypto where there is no key.
  LoadSession(io::RangeSource& source, const std::shared_ptr<const OpenedIndex>& opened,
              std::vector<LoadTarget> targets, const LoadOptions& options);
  ~LoadSession();

  // True when run() takes a few milliseconds at most.
  bool is_brief() const noexcept { return brief_; }

  // Loads everything or throws: malformed, truncated, hash_mismatch, crypto, io, device, cancelled.
  void run(const std::stop_token& stop);

  // Bytes placed so far; readable while run() works.
  uint64_t nbytes_done() const noexcept { return job_.nbytes_done.load(std::memory_order_relaxed); }
  std::shared_ptr<const LoadedHeaders> headers() const noexcept { return job_.headers; }

 private:
  void check_records() const;
  LoadPlan plan_headers() const;
  LoadPlan plan_whole() const;
  LoadPlan plan_parts() const;
  uint64_t unit_nbytes() const;
  unsigned useful_workers() const;
  unsigned workers_of_plan() const;
  bool is_brief_plan() const;
  void fill_zeros();
  void run_and_compare(const std::stop_token& stop);
  void run_plan(const std::stop_token& stop);
  void wipe_destinations() noexcept;
  void wipe_on_device(std::span<const Unit> begun) noexcept;
  device::DeviceRange filled_by(const Piece& piece) const noexcept;

  LoadJob job_;
  bool brief_ = false;
};

}  // namespace tensorizer::load
