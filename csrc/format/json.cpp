#include "format/json.h"

#include <algorithm>
#include <bitset>
#include <charconv>
#include <cstring>

#include "format/tensor_path.h"
#include "format/utf8.h"

namespace tensorizer::format {
namespace {

constexpr size_t kMaxDepth = 127;

std::string shown(char c) {
  if (c >= 0x20 && c < 0x7F) return std::string("'") + c + "'";
  static constexpr char kDigits[] = "0123456789abcdef";
  const auto byte = static_cast<uint8_t>(c);
  return {'0', 'x', kDigits[byte >> 4], kDigits[byte & 15]};
}

void append_hex_escape(std::string& out, uint32_t code_unit) {
  constexpr char kDigits[] = "0123456789abcdef";
  out += "\\u";
  for (int shift = 12; shift >= 0; shift -= 4) out.push_back(kDigits[code_unit >> shift & 0xF]);
}

}  // namespace

JsonReader::JsonReader(std::span<char> text, std::string_view what, uint64_t origin,
                       LoneSurrogates lone)
    : begin_(text.data()),
      at_(text.data()),
      end_(text.data() + text.size()),
      what_(what),
      origin_(origin),
      lone_(lone) {
  if (!is_utf8({text.data(), text.size()})) fail("is not UTF-8");
}

void JsonReader::fail(const std::string& problem) const {
  throw Error(Errc::malformed,
              std::string(what_) + ": " + problem + " (at byte " + std::to_string(offset()) + ")",
              {}, offset());
}

void JsonReader::skip_blanks() noexcept {
  while (at_ != end_ && (*at_ == ' ' || *at_ == '\t' || *at_ == '\n' || *at_ == '\r')) ++at_;
}

bool JsonReader::take(char c) noexcept {
  skip_blanks();
  if (at_ == end_ || *at_ != c) return false;
  ++at_;
  return true;
}

void JsonReader::expect(char c, std::string_view where) {
  if (take(c)) return;
  fail(std::string(where) + ": expected " + shown(c) + ", got " +
       (at_ == end_ ? "the end" : shown(*at_)));
}

bool JsonReader::take_null() noexcept {
  skip_blanks();
  if (end_ - at_ < 4 || std::memcmp(at_, "null", 4) != 0) return false;
  at_ += 4;
  return true;
}

bool JsonReader::next_is(char c) noexcept {
  skip_blanks();
  return at_ != end_ && *at_ == c;
}

std::string_view JsonReader::string(std::string_view where) {
  expect('"', where);
  char* const first = at_;
  char* out = nullptr;  // set from the first escape on
  while (true) {
    if (at_ == end_) fail(std::string(where) + ": a string without its end");
    const char c = *at_;
    if (c == '"') break;
    if (static_cast<uint8_t>(c) < 0x20)
      fail(std::string(where) + ": a control character, " + shown(c));
    if (c == '\\') {
      out = unescape(out == nullptr ? at_ : out);
    } else {
      if (out != nullptr) *out++ = c;
      ++at_;
    }
  }
  const char* const last = out == nullptr ? at_ : out;
  ++at_;
  return {first, static_cast<size_t>(last - first)};
}

// One escape sequence at at_; its text goes to `out`, which is at or before at_.
char* JsonReader::unescape(char* out) {
  ++at_;
  if (at_ == end_) fail("a string without its end");
  const char c = *at_++;
  constexpr std::string_view kLetters = "\"\\/bfnrt";
  constexpr std::string_view kMeanings = "\"\\/\b\f\n\r\t";
  if (const size_t found = kLetters.find(c); found != std::string_view::npos) {
    *out++ = kMeanings[found];
    return out;
  }
  if (c != 'u') fail("an unknown escape, \\" + std::string(1, c));
  uint32_t code_point = hex4();
  if (is_high_surrogate(code_point) && end_ - at_ >= 6 && at_[0] == '\\' && at_[1] == 'u') {
    char* const second = at_;
    at_ += 2;
    const uint32_t low = hex4();
    if (is_low_surrogate(low)) {
      code_point = 0x10000 + ((code_point - 0xD800) << 10) + (low - 0xDC00);
    } else {
      at_ = second;
    }
  }
  if (is_surrogate(code_point) && lone_ == LoneSurrogates::refused) fail("a lone surrogate");
  std::string utf8;
  append_utf8(utf8, code_point);
  return std::ranges::copy(utf8, out).out;
}

uint32_t JsonReader::hex4() {
  if (end_ - at_ < 4) fail("a \\u escape wants four digits");
  uint32_t value = 0;
  for (int i = 0; i < 4; ++i) {
    const char c = *at_++;
    uint32_t digit = 0;
    if (is_digit(c)) {
      digit = static_cast<uint32_t>(c - '0');
    } else if (c >= 'a' && c <= 'f') {
      digit = static_cast<uint32_t>(c - 'a' + 10);
    } else if (c >= 'A' && c <= 'F') {
      digit = static_cast<uint32_t>(c - 'A' + 10);
    } else {
      fail("a \\u escape wants four digits");
    }
    value = value << 4 | digit;
  }
  return value;
}

uint64_t JsonReader::integer(std::string_view where) {
  if (next_is('-')) fail(std::string(where) + ": expected a plain integer, 0 or more");
  const std::string_view text = digits(where);
  uint64_t value = 0;
  if (std::from_chars(text.data(), text.data() + text.size(), value).ec != std::errc{})
    fail(std::string(where) + ": a number of 2^64 or more");
  return value;
}

std::string_view JsonReader::digits(std::string_view where) {
  skip_blanks();
  const bool negative = at_ != end_ && *at_ == '-';
  if (negative) ++at_;
  const char* const first = at_;
  while (at_ != end_ && is_digit(*at_)) ++at_;
  const std::string_view found(first, static_cast<size_t>(at_ - first));
  const bool padded = found.size() > 1 && found.front() == '0';
  const bool other = at_ != end_ && (*at_ == '.' || *at_ == 'e' || *at_ == 'E');
  if (found.empty() || padded || other || (negative && found != "0"))
    fail(std::string(where) + ": expected a plain integer, 0 or more");
  return found;
}

void JsonReader::skip_literal(std::string_view literal) {
  if (static_cast<size_t>(end_ - at_) < literal.size() ||
      std::memcmp(at_, literal.data(), literal.size()) != 0)
    fail("not a JSON value");
  at_ += literal.size();
}

void JsonReader::skip_number() {
  const auto digits = [this] {
    if (at_ == end_ || !is_digit(*at_)) fail("not a JSON number");
    while (at_ != end_ && is_digit(*at_)) ++at_;
  };
  if (*at_ == '-') ++at_;
  if (at_ != end_ && *at_ == '0') {
    ++at_;
  } else {
    digits();
  }
  if (at_ != end_ && *at_ == '.') ++at_, digits();
  if (at_ != end_ && (*at_ == 'e' || *at_ == 'E')) {
    ++at_;
    if (at_ != end_ && (*at_ == '+' || *at_ == '-')) ++at_;
    digits();
  }
}

void JsonReader::skip_scalar() {
  if (at_ == end_) fail("expected a value, got the end");
  switch (*at_) {
    case '"':
      string("a value");
      return;
    case 't':
      return skip_literal("true");
    case 'f':
      return skip_literal("false");
    case 'n':
      return skip_literal("null");
    default:
      if (*at_ != '-' && !is_digit(*at_)) fail("not a JSON value: " + shown(*at_));
      skip_number();
  }
}

void JsonReader::skip_value() {
  std::bitset<kMaxDepth> is_object;  // of the open containers, from the outermost
  size_t depth = 0;
  while (true) {
    // A value begins here.
    skip_blanks();
    const bool object = at_ != end_ && *at_ == '{';
    const bool array = at_ != end_ && *at_ == '[';
    if (object || array) {
      if (depth == kMaxDepth)
        fail("nested deeper than " + std::to_string(kMaxDepth) + " containers");
      ++at_;
      if (!take(object ? '}' : ']')) {
        is_object[depth++] = object;
        if (object) string("a name"), expect(':', "a name");
        continue;
      }
    } else {
      skip_scalar();
    }
    // A value has ended: close the objects and arrays that end with it, or go on to the next value.
    while (depth > 0 && !take(',')) {
      expect(is_object[depth - 1] ? '}' : ']', "a container");
      --depth;
    }
    if (depth == 0) return;
    if (is_object[depth - 1]) string("a name"), expect(':', "a name");
  }
}

void JsonReader::finish() {
  skip_blanks();
  if (at_ != end_) fail("something follows the end: " + shown(*at_));
}

std::vector<TextPair> read_text_object(JsonReader& json, std::string_view where) {
  std::vector<TextPair> pairs;
  std::vector<std::string_view> keys;
  json.object(where, [&](std::string_view key) {
    pairs.push_back({key, json.string(where)});
    keys.push_back(key);
  });
  if (const auto twice = find_duplicate(keys))
    json.fail(std::string(where) + ": the key " + display_name(*twice) + " occurs twice");
  return pairs;
}

std::optional<std::string_view> find_duplicate(std::span<const std::string_view> names) {
  // Sorted by a hash first, which is quick to compare; names that share one are compared in full.
  struct Hashed {
    size_t hash;
    const std::string_view* name;
  };
  std::vector<Hashed> sorted;
  sorted.reserve(names.size());
  for (const std::string_view& name : names)
    sorted.push_back({std::hash<std::string_view>{}(name), &name});
  std::ranges::sort(sorted, [](const Hashed& a, const Hashed& b) {
    return a.hash != b.hash ? a.hash < b.hash : *a.name < *b.name;
  });
  const auto twice = std::ranges::adjacent_find(sorted, [](const Hashed& a, const Hashed& b) {
    return a.hash == b.hash && *a.name == *b.name;
  });
  if (twice == sorted.end()) return std::nullopt;
  return *twice->name;
}

void append_json_string(std::string& out, std::string_view text, bool ascii) {
  constexpr std::string_view kSpecial = "\"\\\b\t\n\f\r";
  constexpr std::string_view kLetters = "\"\\btnfr";
  out.push_back('"');
  while (!text.empty()) {
    const Utf8Char next = ascii ? decode_utf8(text, /*allow_surrogates=*/true)
                                : Utf8Char{static_cast<uint8_t>(text.front()), 1};
    const uint32_t c = next.code_point;
    if (next.nbytes == 0) throw Error(Errc::invalid_argument, "a tensor name is not valid UTF-8");
    const size_t found = c < 0x80 ? kSpecial.find(static_cast<char>(c)) : std::string_view::npos;
    if (found != std::string_view::npos) {
      out.push_back('\\');
      out.push_back(kLetters[found]);
    } else if (ascii && c >= 0x10000) {
      append_hex_escape(out, 0xD800 + ((c - 0x10000) >> 10));
      append_hex_escape(out, 0xDC00 + ((c - 0x10000) & 0x3FF));
    } else if (c < 0x20 || (ascii && c >= 0x7F)) {
      append_hex_escape(out, c);
    } else {
      out += text.substr(0, next.nbytes);
    }
    text.remove_prefix(next.nbytes);
  }
  out.push_back('"');
}

void append_text_object(std::string& out, std::span<const TextPair> pairs) {
  out.push_back('{');
  for (size_t i = 0; i < pairs.size(); ++i) {
    if (i > 0) out.push_back(',');
    append_json_string(out, pairs[i].key);
    out.push_back(':');
    append_json_string(out, pairs[i].value);
  }
  out.push_back('}');
}

}  // namespace tensorizer::format
