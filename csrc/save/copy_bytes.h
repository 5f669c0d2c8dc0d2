// Bytes of a source as they are: copied to a sink, or digested. Nothing is interpreted.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <span>
#include <stop_token>

#include "digest/digest.h"
#include "io/range_sink.h"
#include "io/range_source.h"

namespace tensorizer::save {

// Copies the whole source to the beginning of the sink, several units at a time; one after the
// other where the source is sequential or nobody knows its size. The sink is not published. `done`
// counts bytes. Returns how many there were.
uint64_t copy_bytes(io::RangeSource& source, io::RangeSink& sink, std::atomic<uint64_t>& done,
                    const std::stop_token& stop);

// SHA-256 of the whole source; the next unit is read while one is hashed.
digest::Sha256Digest sha256_of(io::RangeSource& source, std::atomic<uint64_t>& done,
                               const std::stop_token& stop);

}  // namespace tensorizer::save
