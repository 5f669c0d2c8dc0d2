// The same work on several threads, the calling one included. Returns when none of them runs any
// more.
#pragma once

#include <functional>
#include <stop_token>

namespace tensorizer {

// Calls worker(token) on `count` threads at once. The first failure stops the others and is
// rethrown; a stop that comes through `stop` ends in Error(cancelled).
void run_workers(unsigned count, const std::stop_token& stop,
                 const std::function<void(const std::stop_token&)>& worker);

}  // namespace tensorizer
