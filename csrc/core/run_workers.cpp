#include "core/run_workers.h"

#include <exception>

#include "core/error.h"
#include "core/stop.h"
#include "core/task_group.h"

namespace tensorizer {

void run_workers(unsigned count, const std::stop_token& stop,
                 const std::function<void(const std::stop_token&)>& worker) {
  TaskGroup group;
  std::stop_callback forward(stop, [&group] { group.request_stop(); });
  for (unsigned i = 1; i < count; ++i) group.spawn(worker);
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

}  // namespace tensorizer
