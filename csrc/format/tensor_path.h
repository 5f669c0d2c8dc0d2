// Names of tensors: a path of string and integer components, and its two spellings in the file.
// Pure. Source: docs/format.md, "Names" (plain UTF-8, or 0x1E and a JSON array) and "Path rules".
#pragma once

#include <compare>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "core/error.h"

namespace tensorizer::format {

// Python refuses to make an int of more decimal digits, so such an index could not be delivered.
inline constexpr size_t kMaxIndexDigits = 4300;

// A sequence index of any size; `digits` is the canonical decimal text.
struct PathIndex {
  std::string digits;
  auto operator<=>(const PathIndex&) const = default;
};

using PathComponent = std::variant<std::string, PathIndex>;
using TensorPath = std::vector<PathComponent>;

inline constexpr char kStructuredMarker = '\x1e';

inline bool is_structured_name(std::string_view stored) noexcept {
  return !stored.empty() && stored.front() == kStructuredMarker;
}

// Decodes a stored name, by the table of format.md 4.2; booleans are refused. Never
// recurses with the input's nesting. Throws Error(malformed) that quotes a shortened, escaped form
// of the name.
TensorPath decode_name(std::string_view stored);

// The bytes to store: plain for one string component that is neither empty nor starts with 0x1E,
// else 0x1E and a compact ASCII JSON array. REQUIRES: path is not empty, strings are valid UTF-8
// (lone surrogates as WTF-8 are written as \uXXXX escapes). Throws Error: out_of_range beyond 65535
// bytes, invalid_argument for strings that are not UTF-8.
std::string encode_name(const TensorPath& path);

// Throws Error(out_of_range) naming the tensor, if a number does not fit in its field of the file.
void check_fits(std::string_view stored_name, const char* what, uint64_t found, uint64_t limit);
inline constexpr uint64_t kMaxNameNbytes = 65535;
inline constexpr const char* kNameLength = "the length of its name in bytes";

// For messages: printable, quoted, at most ~100 characters.
std::string display_name(std::string_view stored);

// Checks the stored names of one file: every layer has keys of one kind, no path occurs twice, none
// is a prefix of another (format.md 4.3). Throws Error(malformed) as decode_name(), and for those
// rules. Takes O(n log n) comparisons, whatever names a file contains.
void check_paths(std::span<const std::string_view> names);

// An ordered set of paths that keeps the same rules while paths are added. Confined to one thread.
class PathSet {
 public:
  // `broken_rule`: malformed for a file being read, invalid_argument for one being written.
  explicit PathSet(Errc broken_rule = Errc::malformed) : broken_rule_(broken_rule) {}

  // Adds a path, or throws an Error that says which rule it breaks. After a throw the set is
  // unchanged.
  void add(const TensorPath& path);

  // All-or-nothing for a write call: forgets everything added since the mark.
  size_t mark() const noexcept { return paths_.size(); }
  void rollback(size_t mark) noexcept;

 private:
  Errc broken_rule_;
  std::map<TensorPath, size_t> paths_;  // and how many were there before
};

}  // namespace tensorizer::format
