// The index beside the shards of a sharded folder: which file holds which tensor. Pure.
// Source: docs/safetensors.md, "Sharded folders".
#pragma once

#include <cstdint>
#include <vector>

#include "format/json.h"

namespace tensorizer::format {

inline constexpr uint64_t kMaxShardIndexNbytes = 100'000'000;

// Borrows the text it was parsed from.
struct ShardIndex {
  std::vector<TextPair> weight_map;  // tensor name -> file, in the order of the index
  std::vector<TextPair> metadata;    // its texts; numbers such as total_size are left out
};

// Parses `text`, which is unescaped in place. Throws Error(malformed): more than
// kMaxShardIndexNbytes, no JSON, no weight_map, one that is not an object of texts, a tensor twice.
ShardIndex parse_shard_index(std::span<char> text);

}  // namespace tensorizer::format
