// Runs a load: plans it, gives its units to workers of one of two kinds (HostLoad, StagedLoad), and
// wipes what an encrypted load left behind when it failed.
//
// A session is used by one thread, once; run() returns only when no worker can touch a destination
// any more. After a failure of an encrypted load whatever it put into its destinations has been
// wiped, on a device as far as it still takes orders.
#pragma once

#include <cstdint>
#include <memory>
#include <stop_token>
#include <vector>

#include "load/load_job.h"

namespace tensorizer::load {

class LoadSession {
 public:
  // `targets` in ascending order of entry. Throws Error(malformed) for sizes and headers that no
  // file has.
  LoadSession(io::RangeSource& source, const std::shared_ptr<const OpenedIndex>& opened,
              std::vector<LoadTarget> targets, const LoadOptions& options);
  ~LoadSession();

  // True when run() takes a few milliseconds at most.
  bool is_brief() const noexcept { return brief_; }

  // Loads everything or throws: malformed, truncated, hash_mismatch, crypto, io, device, cancelled.
  void run(const std::stop_token& stop);

  // Payload bytes placed so far; readable while run() works.
  uint64_t nbytes_done() const noexcept { return job_.nbytes_done.load(std::memory_order_relaxed); }
  std::shared_ptr<const LoadedHeaders> headers() const noexcept { return job_.headers; }

 private:
  void check_sizes() const;
  void make_plan();
  void run_and_compare(const std::stop_token& stop);
  void run_workers(const std::stop_token& stop);
  void wipe_destinations() noexcept;
  void wipe_on_device() noexcept;
  device::DeviceRange filled_by(const Piece& piece) const noexcept;
  bool has_crypt_info() const noexcept { return job_.opened->prologue.has_crypt_info(); }
  bool is_staged() const noexcept { return has_crypt_info() || job_.options.engine != nullptr; }

  LoadJob job_;
  unsigned workers_ = 1;
  bool brief_ = false;
};

}  // namespace tensorizer::load
