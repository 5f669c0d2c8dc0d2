// Loads plain tensors to host memory: headers to a scratch buffer, payloads by one scattered read
// straight to their destinations, hashes from there. What is in place already (a mapping) is not
// read.
#pragma once

#include <memory>
#include <stop_token>

#include "core/run_units.h"
#include "load/load_job.h"

namespace tensorizer::load {

// One worker of such a load; units are those of job.plan.
std::unique_ptr<UnitWorker> make_host_load(LoadJob& job, const std::stop_token& stop);

}  // namespace tensorizer::load
