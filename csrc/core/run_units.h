// The one loop of loads and saves: units from one counter to workers on several threads, the
// calling one included.
#pragma once

#include <atomic>
#include <cstddef>
#include <functional>
#include <memory>
#include <stop_token>

namespace tensorizer {

// The work of one thread. Made, used and destroyed by that thread.
class UnitWorker {
 public:
  virtual ~UnitWorker() = default;
  // Does work that other threads left and that comes before the next unit. False: there was none.
  virtual bool help() { return false; }
  // Gets the buffers that `unit`, the next one, needs, before it is taken: so a thread with an
  // early unit, for which other threads may wait, waits for no buffer of theirs. Another thread may
  // take the unit meanwhile: then the buffers stay for the next call.
  virtual void prepare(size_t /*unit*/) {}
  virtual void process(size_t unit) = 0;
  // No unit is left.
  virtual void finish() {}
};

using MakeUnitWorker = std::function<std::unique_ptr<UnitWorker>(const std::stop_token&)>;

// Gives the units [0, count) to `workers` workers, each to one. `next` is the first that no worker
// has begun. The calling thread is one of the workers; there are fewer where the system has no more
// threads to give. Returns when none of them runs any more. The first failure stops the others and
// is rethrown; a stop that comes through `stop` ends in Error(cancelled).
void run_units(size_t count, std::atomic<size_t>& next, unsigned workers,
               const std::stop_token& stop, const MakeUnitWorker& make);

// The same for work that needs nothing of a thread's own: calls work(index, token) once for every
// index below `count`, on at most `workers` threads.
void for_each_index(size_t count, unsigned workers, const std::stop_token& stop,
                    const std::function<void(size_t, const std::stop_token&)>& work);

}  // namespace tensorizer
