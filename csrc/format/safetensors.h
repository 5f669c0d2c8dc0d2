// The header of a safetensors file and the index beside sharded ones: bytes <-> values. Pure.
// Source: docs/safetensors.md; the reference implementation's rules are kept, and its doubts
// (a name twice, a gap) are errors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "format/index.h"
#include "format/json.h"

namespace tensorizer::format {

inline constexpr uint64_t kSafetensorsLengthNbytes =
    8;  // of the header's length, which comes first
inline constexpr uint64_t kMaxSafetensorsHeaderNbytes = 100'000'000;

// The metadata of a file: absent and empty are two things.
using Metadata = std::optional<std::vector<TextPair>>;

struct SafetensorsHeader {
  Index index;        // in the order of the payloads; entries have no record header
  Metadata metadata;  // in the order of the file; borrows the index
};

// The header length that a file starts with, if its first bytes may be those of a safetensors file:
// a length and an opening brace, or a length that a header may have.
std::optional<uint64_t> safetensors_header_nbytes(std::span<const std::byte> head) noexcept;

// Throws Error: malformed (more than kMaxSafetensorsHeaderNbytes), truncated (a source of
// `source_nbytes` from `start` on does not hold it).
void check_safetensors_length(uint64_t header_nbytes, uint64_t start, uint64_t source_nbytes);

// Parses `header` (owned from now on), which follows the length at `start`. `source_nbytes`, or
// UINT64_MAX if unknown, must be the end of the last payload. Throws Error: malformed,
// truncated. Unknown types, and types that torch has no dtype for, get an empty `dtype`.
SafetensorsHeader parse_safetensors(std::vector<std::byte> header, uint64_t start,
                                    uint64_t source_nbytes);

// Why an entry without a dtype cannot be loaded.
std::string why_not_loadable(const IndexEntry& entry);

// Writing.
struct SafetensorsTensor {
  std::string_view name;            // UTF-8
  std::string_view dtype;           // as stored in .tensors files, or a safetensors name
  std::span<const uint64_t> shape;  // of the tensor: packed types count their bytes
  uint64_t nbytes = 0;
};

// The order of a canonical file: by type, then by name in byte order. Positions in `tensors`.
// Throws as serialize_safetensors.
std::vector<uint32_t> canonical_order(std::span<const SafetensorsTensor> tensors);

// Length and header of a file that holds `tensors` in this order, padded with blanks to a multiple
// of 8; payloads follow each other behind it without gaps. Throws Error: invalid_argument (a name
// that is taken, reserved or no UTF-8, a dtype that safetensors lack, sizes that disagree),
// out_of_range (a header of more than kMaxSafetensorsHeaderNbytes).
std::vector<std::byte> serialize_safetensors(std::span<const SafetensorsTensor> tensors,
                                             const Metadata& metadata);

inline constexpr uint64_t kMaxShardIndexNbytes = 100'000'000;

// Which file of a sharded folder holds which tensor (docs/safetensors.md, "Sharded folders").
// Borrows the text it was parsed from.
struct ShardIndex {
  std::vector<TextPair> weight_map;  // tensor name -> file, in the order of the index
  std::vector<TextPair> metadata;    // its texts; numbers such as total_size are left out
};

// Parses `text`, which is unescaped in place. Throws Error(malformed): more than
// kMaxShardIndexNbytes, no JSON, no weight_map, one that is not an object of texts, a tensor twice.
ShardIndex parse_shard_index(std::span<char> text);

// Which container a source holds: told by its first bytes, never by its name.
enum class Container : uint8_t {
  tensors,      // |TZR|: prologue, index, records
  safetensors,  // a header length and JSON, then payloads
};

// Bytes that decide: a header length and the brace behind it.
inline constexpr uint64_t kContainerHeadNbytes = kSafetensorsLengthNbytes + 1;

// `head` begins at `origin` of the source and holds kContainerHeadNbytes, or all there are. Throws
// Error(truncated) if it is too short to be either. A file that is neither counts as `tensors`:
// parsing its prologue says what is wrong.
Container detect_container(std::span<const std::byte> head, uint64_t origin);

}  // namespace tensorizer::format
