#include "format/ties.h"

#include <algorithm>
#include <string>

#include "core/error.h"
#include "format/dtype.h"
#include "format/tensor_path.h"

namespace tensorizer::format {
namespace {

// Which entries have some of a few names: one pass over the index.
class NameFinder {
 public:
  // `canonical`: names are compared as paths, whatever their spelling.
  NameFinder(const Index& index, std::vector<std::string> names, bool canonical)
      : names_(std::move(names)), canonical_(canonical) {
    std::ranges::sort(names_);
    names_.erase(std::unique(names_.begin(), names_.end()), names_.end());
    entries_.resize(names_.size());
    for (uint32_t i = 0; i < index.size(); ++i) {
      const auto at = position(spelled(index[i].name));
      if (at) entries_[*at] = i;
    }
  }

  std::optional<uint32_t> find(std::string_view name) const {
    const auto at = position(spelled(name));
    return at ? entries_[*at] : std::nullopt;
  }

  std::string spelled(std::string_view name) const {
    return canonical_ && is_structured_name(name) ? encode_name(decode_name(name))
                                                  : std::string(name);
  }

 private:
  std::optional<size_t> position(const std::string& name) const {
    const auto found = std::ranges::lower_bound(names_, name);
    if (found == names_.end() || *found != name) return std::nullopt;
    return static_cast<size_t>(found - names_.begin());
  }

  std::vector<std::string> names_;  // sorted
  std::vector<std::optional<uint32_t>> entries_;
  bool canonical_;
};

std::vector<std::string> all_names(std::span<const TextPair> ties) {
  std::vector<std::string> names;
  for (const TextPair& tie : ties) {
    for (const std::string_view name : {tie.key, tie.value})
      names.push_back(is_structured_name(name) ? encode_name(decode_name(name))
                                               : std::string(name));
  }
  return names;
}

[[noreturn]] void fail_alias(std::string_view alias, const std::string& problem) {
  throw Error(Errc::malformed, "tie " + display_name(alias) + ": " + problem);
}

void check_listed(const Tie& tie, const Index& index) {
  const IndexEntry& alias = index[*tie.listed];
  const IndexEntry& target = index[tie.target];
  if (alias.zero_filled()) fail_alias(tie.alias, "it is listed without data");
  const bool same = same_dtype(parse_dtype(alias.dtype, true), parse_dtype(target.dtype, true)) &&
                    std::ranges::equal(alias.shape, target.shape) && alias.type == target.type &&
                    alias.data_nbytes == target.data_nbytes;
  if (!same) fail_alias(tie.alias, "it differs from its target " + display_name(target.name));
}

// The names that only an annex knows, together with those of the index.
void check_tie_paths(const Index& index, std::span<const Tie> ties) {
  const auto unlisted = [](const Tie& tie) { return !tie.listed; };
  if (std::ranges::none_of(ties, unlisted)) return;
  std::vector<std::string_view> names;
  names.reserve(index.size() + ties.size());
  for (const IndexEntry& entry : index.entries()) names.push_back(entry.name);
  for (const Tie& tie : ties) {
    if (tie.listed) continue;
    const TensorPath path = decode_name(tie.alias);
    const bool plain = path.size() == 1 && std::holds_alternative<std::string>(path.front());
    if (!plain && index[tie.target].type != TensorType::state_dict)
      fail_alias(tie.alias, "structured names are for state dicts only");
    names.push_back(tie.alias);
  }
  check_paths(names);
}

bool is_identifier_path(std::string_view name) noexcept {
  const auto word = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' ||
           c == '-';
  };
  bool open = false;  // inside a component
  for (const char c : name) {
    if (c == '.' ? !open : !word(c)) return false;
    open = c != '.';
  }
  return open;
}

std::string_view last_component(std::string_view name) noexcept {
  return name.substr(name.rfind('.') + 1);  // npos + 1 is 0
}

}  // namespace

bool read_as_names_of_one_model(std::string_view a, std::string_view b) noexcept {
  const auto dotted = [](std::string_view name) {
    return name.find('.') != std::string_view::npos;
  };
  return is_identifier_path(a) && is_identifier_path(b) &&
         (dotted(a) == dotted(b) || last_component(a) == last_component(b));
}

std::vector<Tie> resolve_ties(const Index& index, std::span<const TextPair> ties) {
  if (ties.empty()) return {};
  const NameFinder names(index, all_names(ties), true);
  std::vector<std::string> aliases;
  for (const TextPair& tie : ties) aliases.push_back(names.spelled(tie.key));
  std::ranges::sort(aliases);
  if (std::ranges::adjacent_find(aliases) != aliases.end())
    fail_alias(*std::ranges::adjacent_find(aliases), "it occurs twice");
  std::vector<Tie> resolved;
  for (const TextPair& pair : ties) {
    const auto target = names.find(pair.value);
    if (!target) fail_alias(pair.key, "the file has no tensor " + display_name(pair.value));
    if (std::ranges::binary_search(aliases, names.spelled(pair.value)))
      fail_alias(pair.key, "its target " + display_name(pair.value) + " is an alias itself");
    const Tie& tie = resolved.emplace_back(Tie{pair.key, *target, names.find(pair.key)});
    if (tie.listed) check_listed(tie, index);
  }
  check_tie_paths(index, resolved);
  return resolved;
}

std::vector<Tie> ties_in_metadata(const Index& index, const Metadata& metadata) {
  std::vector<TextPair> pairs;
  for (const TextPair& pair : metadata.value_or(std::vector<TextPair>{})) {
    if (read_as_names_of_one_model(pair.key, pair.value)) pairs.push_back(pair);
  }
  if (pairs.empty()) return {};
  std::vector<std::string> wanted;
  for (const TextPair& pair : pairs) wanted.emplace_back(pair.key), wanted.emplace_back(pair.value);
  const NameFinder names(index, std::move(wanted), false);
  std::vector<Tie> ties;
  for (const TextPair& pair : pairs) {
    const auto target = names.find(pair.value);
    if (target && !names.find(pair.key)) ties.push_back({pair.key, *target, std::nullopt});
  }
  return ties;
}

}  // namespace tensorizer::format
