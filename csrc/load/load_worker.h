// What one thread does to load the units of one job, whole tensors and parts alike, to host memory
// and to a device. A unit goes through four stages:
//   read    plain, for the host: by one scattered read to where the pieces go, headers to a
//           scratch buffer; for a device: into a buffer, as it is in the file; else by one
//           contiguous read, an image of the unit's stretch of the file, into memory of ours
//   open    headers become fields; chunks of the cipher are opened from the image to where the
//           pieces go, or in place in the buffer, or left to the device; runs of plain parts are
//           copied to where they go
//   digest  from there
//   place   pieces in a buffer are sent to the device, once their destinations are allocated
// The buffer is one of the copier, taken before the unit is. From a source that waits it is memory
// of ours, so that no pinned buffer waits for the network: its pieces are copied to a buffer of the
// copier when they are complete, and it is what the steps are hashed from.
#pragma once

#include <functional>
#include <memory>
#include <stop_token>

#include "load/load_job.h"

namespace tensorizer::load {

// Made, used and destroyed by one thread.
class LoadWorker {
 public:
  virtual ~LoadWorker() = default;

  // Hashes what others left; false: there is nothing.
  virtual bool help() = 0;

  // Gets a buffer for the next unit.
  virtual void prepare() = 0;
  // Gives back what prepare() got.
  virtual void unprepare() = 0;
  // Ends the use of every buffer of the copier: who waits in line for another copier's holds none.
  virtual void release_buffers() = 0;

  virtual void process(size_t unit) = 0;
  // No unit is left.
  virtual void finish() = 0;
};

// Units are those of job.plan. `before_line` is called before the thread waits in line for a buffer
// of the copier, which has none then.
std::unique_ptr<LoadWorker> make_load_worker(LoadJob& job, const std::stop_token& stop,
                                             std::function<void()> before_line);

}  // namespace tensorizer::load
