// What one thread does for loads to devices, one or several at once.
//   read    into a buffer of the copier, as the unit is in the file; runs of parts one behind the
//           other. From another machine into memory of ours first, so that no buffer of the copier
//           waits for the network
//   open    chunks are opened in the buffer, a few at a time, while they are in the cache; or left
//           to the device
//   digest  from there
//   place   pieces in a buffer are sent to the device, once their destinations are allocated
// The buffer is taken before the unit is. A thread that waits in line for a buffer of one device
// holds none of another's.
#pragma once

#include <memory>
#include <span>
#include <stop_token>

#include "core/run_units.h"
#include "load/load_session.h"
#include "load/unit_order.h"

namespace tensorizer::load {

// The units are those of `order`, and of the plan of the only session where that is empty. Both
// outlive the worker.
std::unique_ptr<UnitWorker> make_device_worker(std::span<LoadSession* const> sessions,
                                               std::span<const NumberedUnit> order,
                                               const std::stop_token& stop);

}  // namespace tensorizer::load
