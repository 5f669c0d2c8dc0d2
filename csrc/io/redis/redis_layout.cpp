#include "io/redis/redis_layout.h"

#include <algorithm>
#include <charconv>

#include "core/checked_math.h"
#include "core/error.h"

namespace tensorizer::io {

std::string escape_glob(std::string_view text) {
  std::string escaped;
  for (char c : text) {
    if (std::string_view("*?[]\\^-").find(c) != std::string_view::npos) escaped += '\\';
    escaped += c;
  }
  return escaped;
}

std::optional<uint64_t> key_position(std::string_view key) {
  const size_t colon = key.rfind(':');
  if (colon == std::string_view::npos) return std::nullopt;
  const std::string_view digits = key.substr(colon + 1);
  uint64_t position = 0;
  const auto [end, problem] =
      std::from_chars(digits.data(), digits.data() + digits.size(), position);
  if (problem != std::errc() || end != digits.data() + digits.size()) return std::nullopt;
  return position;
}

void drop_nested_models(std::string_view prefix, std::vector<std::string>& keys) {
  constexpr std::string_view kHeader = "header:0";
  const std::string own_header = std::string(prefix) + ":" + std::string(kHeader);
  std::vector<std::string> nested;  // "<other prefix>:"
  for (const std::string& key : keys)
    if (key != own_header && key.ends_with(std::string(":") + std::string(kHeader)))
      nested.push_back(key.substr(0, key.size() - kHeader.size()));
  if (nested.empty()) return;
  std::erase_if(keys, [&](const std::string& key) {
    return std::any_of(nested.begin(), nested.end(),
                       [&](const std::string& other) { return key.starts_with(other); });
  });
}

RedisLayout::RedisLayout(std::vector<RedisValue> values) : values_(std::move(values)) {
  std::erase_if(values_, [](const RedisValue& value) { return value.nbytes == 0; });
  std::sort(values_.begin(), values_.end(), [](const RedisValue& a, const RedisValue& b) {
    return a.offset != b.offset ? a.offset < b.offset : a.key < b.key;
  });
  disputed_.resize(values_.size());
  size_t furthest = 0;  // the value that reaches furthest so far
  for (size_t i = 0; i < values_.size(); ++i) {
    const RedisValue& value = values_[i];
    const std::optional<uint64_t> end = checked_add(value.offset, value.nbytes);
    if (!end)
      throw Error(Errc::malformed, "Redis key " + value.key + ": its position plus its " +
                                       std::to_string(value.nbytes) + " bytes exceeds 64 bits");
    if (i > 0 && value.offset < end_) disputed_[i] = disputed_[furthest] = true;
    if (*end > end_) {
      end_ = *end;
      furthest = i;
    }
  }
}

std::optional<size_t> RedisLayout::find(uint64_t offset) const {
  auto after = std::upper_bound(
      values_.begin(), values_.end(), offset,
      [](uint64_t position, const RedisValue& value) { return position < value.offset; });
  if (after == values_.begin()) return std::nullopt;
  const size_t i = static_cast<size_t>(after - values_.begin()) - 1;
  // A longer value further left may reach here too, but then this one is disputed or the longer one
  // is the answer.
  for (size_t j = i + 1; j-- > 0;) {
    if (offset - values_[j].offset < values_[j].nbytes) return j;
    if (!disputed_[j]) break;
  }
  return std::nullopt;
}

uint64_t RedisLayout::contiguous_end(uint64_t offset) const {
  for (auto i = find(offset); i && !disputed_[*i]; i = find(offset))
    offset = values_[*i].offset + values_[*i].nbytes;
  return offset;
}

std::vector<RedisPiece> RedisLayout::pieces(const std::string& name, uint64_t offset,
                                            uint64_t nbytes, uint64_t max_piece_nbytes) const {
  const std::optional<uint64_t> end = checked_add(offset, nbytes);
  if (!end) throw Error(Errc::invalid_argument, name + ": a read beyond 64 bits", name, offset);
  std::vector<RedisPiece> pieces;
  while (offset < *end) {
    const std::optional<size_t> i = find(offset);
    if (!i)
      throw Error(Errc::truncated,
                  name + ": expected bytes up to " + std::to_string(*end) +
                      ", but no key holds byte " + std::to_string(offset) +
                      (offset >= end_ ? " (the last key ends there)" : ""),
                  name, offset);
    const RedisValue& value = values_[*i];
    if (disputed_[*i])
      throw Error(
          Errc::malformed,
          name + ": key " + value.key + " overlaps another key, whose position lies " +
              "inside it or before it: two models under one prefix, or left-overs of an older one",
          name, offset);
    const uint64_t from = offset - value.offset;
    const uint64_t n = std::min({value.nbytes - from, *end - offset, max_piece_nbytes});
    pieces.push_back({*i, from, n});
    offset += n;
  }
  return pieces;
}

}  // namespace tensorizer::io
