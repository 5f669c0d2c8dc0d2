// What one thread does for loads to host memory, or to nowhere: of record headers alone.
//   read    plain: by one scattered read to where the pieces go, headers to a scratch buffer; else
//           an image
//   open    chunks are opened from the image to the destination
//   digest  from there
//   place   nothing is left to do
#pragma once

#include <memory>
#include <span>
#include <stop_token>

#include "core/run_units.h"
#include "load/load_session.h"
#include "load/unit_order.h"

namespace tensorizer::load {

// The units are those of `order`, all of this session; of its plan where that is empty. Both
// outlive the worker.
std::unique_ptr<UnitWorker> make_host_worker(LoadSession& session,
                                             std::span<const NumberedUnit> order,
                                             const std::stop_token& stop);

}  // namespace tensorizer::load
