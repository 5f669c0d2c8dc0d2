#include "core/run_units.h"

#include <algorithm>
#include <exception>
#include <system_error>

#include "core/error.h"
#include "core/task_group.h"

namespace tensorizer {
namespace {

void spawn_as_many_as_possible(TaskGroup& group, unsigned count,
                               const std::function<void(const std::stop_token&)>& worker) {
  try {
    for (unsigned i = 0; i < count; ++i) group.spawn(worker);
  } catch (const std::system_error&) {  // no more threads: those there are do the work
  }
}

// Calls worker(token) on `count` threads at once, the calling one included.
void run_workers(unsigned count, const std::stop_token& stop,
                 const std::function<void(const std::stop_token&)>& worker) {
  TaskGroup group;
  std::stop_callback forward(stop, [&group] { group.request_stop(); });
  spawn_as_many_as_possible(group, count > 0 ? count - 1 : 0, worker);
  std::exception_ptr own;
  try {
    worker(group.stop_token());
  } catch (const Error& error) {
    if (error.code() != Errc::cancelled) own = std::current_exception();
    group.request_stop();
  } catch (...) {
    own = std::current_exception();
    group.request_stop();
  }
  if (own) {
    try {
      group.join();
    } catch (...) {  // which of several failures comes first is chance; one is enough
    }
    std::rethrow_exception(own);
  }
  group.join();
  throw_if_stopped(stop);
}

}  // namespace

void run_units(size_t count, std::atomic<size_t>& next, unsigned workers,
               const std::stop_token& stop, const MakeUnitWorker& make) {
  run_workers(workers, stop, [&](const std::stop_token& token) {
    const std::unique_ptr<UnitWorker> worker = make(token);
    for (;;) {
      throw_if_stopped(token);
      if (worker->help()) continue;
      size_t unit = next.load(std::memory_order_relaxed);
      if (unit >= count) break;
      worker->prepare(unit);
      if (next.compare_exchange_strong(unit, unit + 1, std::memory_order_relaxed))
        worker->process(unit);
    }
    worker->finish();
  });
}

void for_each_index(size_t count, unsigned workers, const std::stop_token& stop,
                    const std::function<void(size_t, const std::stop_token&)>& work) {
  std::atomic<size_t> next{0};
  const auto threads = static_cast<unsigned>(std::clamp<size_t>(count, 1, std::max(workers, 1U)));
  run_workers(threads, stop, [&](const std::stop_token& token) {
    for (;;) {
      throw_if_stopped(token);
      const size_t index = next.fetch_add(1, std::memory_order_relaxed);
      if (index >= count) return;
      work(index, token);
    }
  });
}

}  // namespace tensorizer
