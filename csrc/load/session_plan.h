// The plans of a session: how its units are cut and in which order they are taken, by its source,
// its digests, its cipher and its device; and how many workers take them.
#pragma once

#include <cstdint>

#include "load/load_session.h"

namespace tensorizer::load {

// Of host memory that is read to where answers come from another machine and bytes go on to a
// device.
inline constexpr uint64_t kReadBuffersNbytes = uint64_t{512} << 20;

// Once, when all else of the session is set. Throws Error: malformed for sizes and headers that no
// file has; crypto where there is no key; invalid_argument.
void make_first_plan(LoadSession& session);

// Before the workers of a plan begin. False: there is no (further) plan.
bool begin_next_plan(LoadSession& session);

// Of kReadBuffersNbytes, what each of so many workers gets for this session.
void divide_read_buffers(LoadSession& session, unsigned workers);

// As many as have something to do at the same time; of the plan: no more than it has units.
unsigned useful_workers(const LoadSession& session);
unsigned workers_of_plan(const LoadSession& session);

}  // namespace tensorizer::load
