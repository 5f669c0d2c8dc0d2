// What record headers say beyond the index, read without their payloads: the module a tensor
// belongs to, and the digests that are stored.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <stop_token>
#include <vector>

#include "format/record_header.h"
#include "io/range_source.h"
#include "load/open_index.h"

namespace tensorizer::load {

struct StoredDigest {
  format::HashType type;
  std::vector<std::byte> value;
};

struct RecordFacts {
  uint16_t module_idx = 0;
  std::vector<StoredDigest> digests;  // in stored order
};

// One result per entry of `entries`, in their order; several headers are read at a time. Throws
// Error: malformed, truncated, crypto, or what the source throws.
std::vector<RecordFacts> read_record_facts(io::RangeSource& source, const OpenedIndex& opened,
                                           std::span<const uint32_t> entries,
                                           const std::stop_token& stop);

}  // namespace tensorizer::load
