// How many threads are useful here. Safe from any thread.
#pragma once

namespace tensorizer {

// Processors this process may use: the scheduling mask, cut by the cgroup CPU quota (v1 or v2),
// rounded up, at least 1. Read once.
unsigned cpu_quota() noexcept;

}  // namespace tensorizer
