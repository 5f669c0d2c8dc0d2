// One range of an object, fetched into memory: resumed at its byte where it breaks.
#pragma once

#include <cstdint>
#include <span>
#include <stop_token>

#include "io/buffers.h"
#include "io/http/http_client.h"
#include "io/range_source.h"

namespace tensorizer::io {

// Fills `buffers` with the bytes from `offset` on. Returns how many there were: all, or fewer where
// an object of unknown size ends. `known` is the object's identity. `progress`, if it is not empty,
// is called by this thread while bytes arrive. `earlier`, if not null, counts as the first try.
// Throws Error: io, not_found, cancelled.
uint64_t fetch_range(HttpClient& client, const ResourceIdentity& known, uint64_t offset,
                     std::span<const Buffer> buffers, const std::stop_token& stop,
                     const RangeSource::Progress& progress = {},
                     const HttpFailure* earlier = nullptr);

}  // namespace tensorizer::io
