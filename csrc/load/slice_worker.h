// What one thread does to load parts of tensors: reads the stretches of a slice plan and gives
// their bytes to the parts' destinations.
#pragma once

#include <memory>
#include <span>
#include <stop_token>

#include "core/run_units.h"
#include "load/load_job.h"
#include "load/payload_cipher.h"
#include "load/slice_plan.h"
#include "load/slice_session.h"

namespace tensorizer::load {

// Shared by the workers of a load, and outlived by none of them.
struct SliceWork {
  LoadJob& job;
  std::span<const SliceTarget> targets;  // with the numbers of the plan's parts
  std::span<const SlicePart> parts;
  const SlicePlan& plan;
  const PayloadCipher* cipher;  // null: not encrypted
};

std::unique_ptr<UnitWorker> make_slice_worker(const SliceWork& work, const std::stop_token& stop);

}  // namespace tensorizer::load
