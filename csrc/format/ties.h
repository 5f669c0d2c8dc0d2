// Tensors that are one tensor: names that stand for another one. Pure.
// Source: docs/format.md, "Ties"; for safetensors files docs/safetensors.md, "Aliases".
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "format/index.h"
#include "format/json.h"
#include "format/safetensors.h"

namespace tensorizer::format {

struct Tie {
  std::string_view alias;          // stored name; borrows the pair it came from
  uint32_t target = 0;             // entry of the index
  std::optional<uint32_t> listed;  // the alias's own entry, where the file holds the tensor twice
};

// Checks the ties of an annex against the index: every target is listed and no alias; a listed
// alias has data, dtype and shape of its target; others obey the path rules together with all
// listed names. Throws Error(malformed).
std::vector<Tie> resolve_ties(const Index& index, std::span<const TextPair> ties);

// Whether two texts may be names of one model: dotted identifiers, both nested or alike at the end.
bool read_as_names_of_one_model(std::string_view a, std::string_view b) noexcept;

// The ties that a safetensors file's metadata tells of: savers of modules note `dropped = kept` for
// tensors they leave out. A convention, not a rule, so only pairs that read as names of one model
// count: the value names a tensor, the key does not, and both are dotted identifiers alike.
std::vector<Tie> ties_in_metadata(const Index& index, const Metadata& metadata);

}  // namespace tensorizer::format
