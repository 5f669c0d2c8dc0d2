// What one thread does to load, whole tensors and parts alike, to host memory and to a device. A
// unit goes through four stages:
//   read    plain, for the host: by one scattered read to where the pieces go, headers to a
//           scratch buffer; else by one contiguous read, an image of the unit's stretch of the
//           file: into a buffer of the lane, or into memory of ours where it is encrypted or its
//           runs are short
//   open    headers become fields; chunks of the cipher are opened from the image to where the
//           pieces go (the cipher is the copy), runs of plain parts are copied there
//   digest  from there
//   place   pieces in a buffer of the lane are sent to the device
#pragma once

#include <memory>
#include <stop_token>

#include "core/run_units.h"
#include "load/load_job.h"

namespace tensorizer::load {

// Units are those of job.plan.
std::unique_ptr<UnitWorker> make_load_worker(LoadJob& job, const std::stop_token& stop);

}  // namespace tensorizer::load
