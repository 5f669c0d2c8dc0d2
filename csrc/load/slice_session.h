// Runs a load of parts of tensors: plans their byte ranges, reads them with several workers
// straight to their destinations, which are contiguous, and decrypts what is encrypted chunk by
// chunk, so that a part is as authentic as the whole.
//
// Record headers are read of encrypted files alone, for their keys and MACs: a part has no stored
// hash. A session is used by one thread, once; run() returns only when no worker can touch a
// destination any more. After a failure of an encrypted load whatever it put into its destinations
// has been wiped.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <stop_token>
#include <vector>

#include "device/tensor_memory.h"
#include "load/load_job.h"
#include "load/payload_cipher.h"
#include "load/slice_plan.h"

namespace tensorizer::load {

// Elements of one tensor, and where they go.
struct SliceTarget {
  uint32_t entry = 0;                // number in the index
  SliceRuns runs;                    // within its loaded_nbytes
  device::TensorMemory destination;  // of runs.nbytes(); none where that is 0
};

struct SliceOptions {
  LoadOptions load;  // without `verify`: no part can be verified
  // Bytes between two ranges that are read rather than skipped; nullopt: as the source likes it.
  std::optional<uint64_t> gap_nbytes;
};

class SliceSession {
 public:
  // Targets in any order, overlapping or not. Throws Error: malformed, crypto (no key).
  SliceSession(io::RangeSource& source, const std::shared_ptr<const OpenedIndex>& opened,
               std::vector<SliceTarget> targets, const SliceOptions& options);
  ~SliceSession();

  // True when run() takes a few milliseconds at most.
  bool is_brief() const noexcept { return brief_; }

  // Loads everything or throws: malformed, truncated, crypto, io, device, cancelled.
  void run(const std::stop_token& stop);

  // Bytes placed so far; readable while run() works.
  uint64_t nbytes_done() const noexcept { return job_.nbytes_done.load(std::memory_order_relaxed); }

 private:
  void fill_zeros();
  void plan_plain();
  void run_and_compare(const std::stop_token& stop);
  void read_headers(const std::stop_token& stop);
  void make_plan();
  unsigned workers_for(size_t units) const;
  void wipe_destinations() noexcept;
  bool has_crypt_info() const noexcept { return job_.opened->prologue.has_crypt_info(); }

  const std::vector<SliceTarget> targets_;
  const std::optional<uint64_t> gap_nbytes_;
  LoadJob job_;  // of the records that the parts belong to, each once
  std::vector<SlicePart> parts_;
  SlicePlan plan_;
  std::unique_ptr<PayloadCipher> cipher_;  // set iff the file has crypt_info
  bool brief_ = false;
};

}  // namespace tensorizer::load
