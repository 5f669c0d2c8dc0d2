// Which Redis key holds which bytes of a file (docs/format.md, section 8). Pure.
//
// A key ends in a colon and the position of its value's first byte; the file is the union of the
// values.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tensorizer::io {

// `text` with the characters that SCAN's patterns give a meaning preceded by a backslash.
std::string escape_glob(std::string_view text);

// The number after the last colon; nullopt where there is none or it does not fit.
std::optional<uint64_t> key_position(std::string_view key);

// Removes the keys of other models whose prefix begins with "<prefix>:": the pattern "a:*" also
// finds what was stored under "a:b", which its own header key "a:b:header:0" gives away.
void drop_nested_models(std::string_view prefix, std::vector<std::string>& keys);

struct RedisValue {
  std::string key;
  uint64_t offset = 0;
  uint64_t nbytes = 0;
};

// A stretch of one value, as a read asks for it.
struct RedisPiece {
  size_t value = 0;  // index into RedisLayout::values()
  uint64_t from = 0;
  uint64_t nbytes = 0;
};

// Immutable once made; safe from many threads.
class RedisLayout {
 public:
  // `values` in any order. Empty ones hold no byte and are left out. Throws Errc::malformed where a
  // value's end does not fit 64 bits. Two values that claim the same byte are an error of the read
  // that wants one of them, so that a stray key spoils no more than it covers.
  explicit RedisLayout(std::vector<RedisValue> values);

  const std::vector<RedisValue>& values() const noexcept { return values_; }
  uint64_t end() const noexcept { return end_; }

  // End of the bytes that follow `offset` without a hole or a dispute; `offset` itself where there
  // is none.
  uint64_t contiguous_end(uint64_t offset) const;

  // The pieces that make up [offset, offset + nbytes), none longer than `max_piece_nbytes`.
  // Throws Errc::truncated at a hole or past the end, Errc::malformed where two values disagree;
  // `name` says of what.
  std::vector<RedisPiece> pieces(const std::string& name, uint64_t offset, uint64_t nbytes,
                                 uint64_t max_piece_nbytes) const;

 private:
  std::optional<size_t> find(uint64_t offset) const;

  std::vector<RedisValue> values_;  // by offset
  std::vector<bool> disputed_;      // overlaps a neighbour
  uint64_t end_ = 0;
};

}  // namespace tensorizer::io
