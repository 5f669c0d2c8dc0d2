// Opening a container: prologue and index of a source. Pure apart from one read each.
#pragma once

#include <cstdint>
#include <memory>
#include <stop_token>

#include "format/index.h"
#include "format/prologue.h"
#include "io/range_source.h"

namespace tensorizer::load {

// What a container says about itself. Immutable, shared by everything that loads from it.
struct OpenedIndex {
  OpenedIndex(uint64_t at, const format::Prologue& p, format::Index i)
      : start(at), prologue(p), index(std::move(i)) {}

  uint64_t start = 0;  // position of the magic in the source
  format::Prologue prologue;
  format::Index index;
};

// Reads the first bytes of the container that starts at `start`. Throws Error: malformed,
// unsupported, truncated, crypto, io; the message names the source.
format::Prologue open_prologue(io::RangeSource& source, uint64_t start, format::KeyGiven key,
                               const std::stop_token& stop);

// Reads the index that follows the prologue at `start`. Every length is compared with the source's
// size before it sizes memory. Throws as open_prologue.
std::shared_ptr<const OpenedIndex> open_index(io::RangeSource& source, uint64_t start,
                                              const format::Prologue& prologue,
                                              const std::stop_token& stop);

}  // namespace tensorizer::load
