// A load of whole tensors, or of parts of them, from one source to one device: its plan, and what
// becomes of it when it fails. load_together.h runs it, alone or with others.
//
// A session is used by one thread, once. After a failure of an encrypted load whatever it put into
// its destinations has been wiped, on a device as far as it still takes orders. Parts come together
// in contiguous destinations; of encrypted files whole chunks are opened, so that a part is as
// authentic as the whole.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <stop_token>
#include <vector>

#include "load/allocate.h"
#include "load/load_job.h"

namespace tensorizer::load {

class LoadSession {
 public:
  // Whole tensors in ascending order of entry. Throws Error: malformed for sizes and headers that
  // no file has; crypto where there is no key.
  LoadSession(io::RangeSource& source, const std::shared_ptr<const OpenedIndex>& opened,
              std::vector<LoadTarget> targets, const LoadOptions& options);
  ~LoadSession();

  // True when it takes a few milliseconds at most, once its destinations are there.
  bool is_brief() const noexcept { return brief_; }

  // Loads everything or throws: malformed, truncated, hash_mismatch, crypto, io, device, cancelled.
  // Returns only when no worker can touch a destination any more. See load_together.h.
  void run(const std::stop_token& stop);

  // The destinations are allocated while it runs, by load_together(). REQUIRES: an engine; whole
  // tensors.
  void allocate_while_it_runs(std::vector<MemoryGroup> groups, MemoryMaker memory);
  // All of it now; the engine is to be ordered after it.
  void allocate_now();

  std::span<const LoadTarget> targets() const noexcept { return job_.targets; }

  // Bytes placed so far; readable while run() works.
  uint64_t nbytes_done() const noexcept { return job_.nbytes_done.load(std::memory_order_relaxed); }
  std::shared_ptr<const LoadedHeaders> headers() const noexcept { return job_.headers; }

 private:
  friend class Together;

  void check_records() const;
  LoadPlan plan_whole() const;
  LoadPlan plan_parts() const;
  uint64_t unit_nbytes() const;
  unsigned useful_workers() const;
  unsigned workers_of_plan() const;
  bool is_brief_plan() const;
  void fill_zeros();

  // For the one who runs it: before the workers begin. False: there is no (further) plan.
  bool begin_plan(unsigned workers);
  void allocate_group(size_t group);
  void memory_is_ready(std::span<const size_t> groups);
  // In the handler of an error of a worker: a source that changed meanwhile explains what is wrong
  // with its bytes.
  void blame_source(const Error& error);
  void wipe_destinations() noexcept;
  void wipe_on_device() noexcept;
  device::DeviceRange filled_by(const Piece& piece) const noexcept;

  LoadJob job_;
  bool brief_ = false;
  unsigned plans_begun_ = 0;
  std::vector<MemoryGroup> groups_;  // not allocated when it begins
  MemoryMaker memory_;
};

}  // namespace tensorizer::load
