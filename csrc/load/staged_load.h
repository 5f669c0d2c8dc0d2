// Loads what passes through memory of ours on its way: encrypted tensors, and tensors bound for a
// device. A unit is read by one contiguous read into one buffer, an image of its stretch of the
// file: headers are parsed there, chunks are opened from there, and copies to a device are sent
// from there, each piece from its place in the unit.
#pragma once

#include <memory>
#include <stop_token>

#include "core/run_units.h"
#include "load/load_job.h"

namespace tensorizer::load {

// Shared by the workers of such a load; units are those of job.plan. REQUIRES: outlives them.
class StagedLoad {
 public:
  explicit StagedLoad(LoadJob& job);
  ~StagedLoad();

  std::unique_ptr<UnitWorker> make_worker(const std::stop_token& stop);

 private:
  class Worker;
  struct Shared;
  std::unique_ptr<Shared> shared_;
};

}  // namespace tensorizer::load
