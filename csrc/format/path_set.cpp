// The rules for all paths of one file (format.md 4.3).
#include <algorithm>
#include <functional>

#include "format/tensor_path.h"
#include "format/utf8.h"

namespace tensorizer::format {
namespace {

// The rule that a path breaks beside another one of the file; nullptr if it breaks none.
const char* rule_broken_beside(const TensorPath& path, const TensorPath& other) {
  const auto [mine, theirs] = std::ranges::mismatch(path, other);
  if (mine == path.end())
    return theirs == other.end() ? " occurs twice"
                                 : " is also the beginning of other tensors' paths";
  if (theirs == other.end()) return " goes through a path that is a tensor itself";
  if (mine->index() != theirs->index())
    return " mixes string keys and sequence positions in one layer";
  return nullptr;
}

[[noreturn]] void refuse(Errc code, std::string_view stored, const char* problem) {
  throw Error(code, "tensor name " + display_name(stored) + problem);
}

// Plain names only need to differ. Sorted by hash, so that most comparisons are those of integers;
// names that were chosen to collide are compared as texts.
void check_unique(std::span<const std::string_view> names) {
  struct Hashed {
    size_t hash;
    std::string_view name;
  };
  std::vector<Hashed> sorted;
  sorted.reserve(names.size());
  for (const std::string_view name : names)
    sorted.push_back({std::hash<std::string_view>{}(name), name});
  std::ranges::sort(sorted, [](const Hashed& a, const Hashed& b) {
    return a.hash != b.hash ? a.hash < b.hash : a.name.compare(b.name) < 0;
  });
  const auto twice = std::ranges::adjacent_find(sorted, [](const Hashed& a, const Hashed& b) {
    return a.hash == b.hash && a.name == b.name;
  });
  if (twice != sorted.end()) refuse(Errc::malformed, twice->name, " occurs twice");
}

}  // namespace

void check_paths(std::span<const std::string_view> names) {
  const auto is_plain = [](std::string_view name) {
    return !name.empty() && !is_structured_name(name) && is_utf8(name);
  };
  if (std::ranges::all_of(names, is_plain)) return check_unique(names);
  PathSet paths;
  for (const std::string_view name : names) paths.add(decode_name(name));
}

// The neighbours of a path in this order show every rule that it breaks: the paths that go through
// it follow it, a path that it goes through precedes it, and in each layer the string keys precede
// the positions.
void PathSet::add(const TensorPath& path) {
  if (path.empty()) throw Error(Errc::invalid_argument, "a tensor's path has no components");
  const auto check = [&](const TensorPath& other) {
    if (const char* const problem = rule_broken_beside(path, other))
      refuse(broken_rule_, encode_name(path), problem);
  };
  const auto next = paths_.lower_bound(path);
  if (next != paths_.end()) check(next->first);
  if (next != paths_.begin()) check(std::prev(next)->first);
  paths_.emplace_hint(next, path, paths_.size());
}

void PathSet::rollback(size_t mark) noexcept {
  std::erase_if(paths_, [mark](const auto& path) { return path.second >= mark; });
}

}  // namespace tensorizer::format
