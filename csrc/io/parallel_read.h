// One large read as several that run at the same time, for callers that have no load session.
#pragma once

#include "io/range_source.h"

namespace tensorizer::io {

// Fills `into` with the bytes from `offset` on, in units of the source's liking on as many threads
// as it finds useful.
void read_parallel(RangeSource& source, uint64_t offset, Slice into, const std::stop_token& stop);

}  // namespace tensorizer::io
