#include "format/tensor_path.h"

#include <algorithm>
#include <optional>

#include "core/error.h"
#include "format/utf8.h"

namespace tensorizer::format {
namespace {

// Python refuses to make an int of more decimal digits, so such an index could not be delivered.
constexpr size_t kMaxIndexDigits = 4300;

std::optional<uint32_t> hex_value(std::string_view four) noexcept {
  uint32_t value = 0;
  for (char c : four) {
    const char lower = static_cast<char>(c | 0x20);
    if (is_digit(c)) {
      value = value << 4 | static_cast<uint32_t>(c - '0');
    } else if (lower >= 'a' && lower <= 'f') {
      value = value << 4 | static_cast<uint32_t>(lower - 'a' + 10);
    } else {
      return std::nullopt;
    }
  }
  return value;
}

// A flat JSON array of strings and non-negative integers. Nested values are refused where they
// begin, so nothing recurses. `text_` is valid UTF-8.
class ArrayParser {
 public:
  ArrayParser(std::string_view stored, std::string_view text) noexcept
      : stored_(stored), text_(text) {}

  TensorPath parse() {
    TensorPath path;
    expect('[');
    skip_blanks();
    if (peek() == ']') fail("has no components");
    for (;;) {
      skip_blanks();
      path.push_back(component());
      skip_blanks();
      if (peek() == ']') break;
      expect(',');
    }
    expect(']');
    if (at_ != text_.size()) fail("has text after its array");
    return path;
  }

 private:
  [[noreturn]] void fail(const std::string& problem) const {
    throw Error(Errc::malformed, "tensor name " + display_name(stored_) + " " + problem);
  }

  char peek() const noexcept { return at_ < text_.size() ? text_[at_] : '\0'; }

  void expect(char c) {
    if (at_ >= text_.size() || text_[at_] != c) fail("is not a JSON array");
    ++at_;
  }

  void skip_blanks() noexcept {
    while (peek() == ' ' || peek() == '\t') ++at_;
  }

  PathComponent component() {
    const char c = peek();
    if (c == '"') return string();
    if (is_digit(c) || c == '-') return integer();
    switch (c) {
      case '[':
      case '{':
        fail("has a component that is neither a string nor an integer");
      case 't':
      case 'f':
        fail("has a boolean component");
      case 'n':
        fail("has a null component");
      default:
        fail("is not a JSON array of strings and integers");
    }
  }

  PathIndex integer() {
    const bool negative = peek() == '-';
    if (negative) ++at_;
    const size_t begin = at_;
    while (is_digit(peek())) ++at_;
    const std::string_view digits = text_.substr(begin, at_ - begin);
    if (digits.empty() || (digits.size() > 1 && digits.front() == '0')) fail("is not a JSON array");
    if (peek() == '.' || peek() == 'e' || peek() == 'E')
      fail("has a number that is not an integer");
    if (negative && digits != "0") fail("has a negative index");
    if (digits.size() > kMaxIndexDigits)
      fail("has an index of " + std::to_string(digits.size()) + " digits");
    return PathIndex{std::string(digits)};
  }

  std::string string() {
    expect('"');
    std::string value;
    for (;;) {
      if (at_ >= text_.size()) fail("has a string without end");
      const char c = text_[at_];
      if (static_cast<uint8_t>(c) < 0x20) fail("has a control character in a string");
      ++at_;
      if (c == '"') return value;
      if (c == '\\') {
        append_escape(value);
      } else {
        value.push_back(c);
      }
    }
  }

  void append_escape(std::string& value) {
    const char c = peek();
    ++at_;
    switch (c) {
      case '"':
      case '\\':
      case '/':
        value.push_back(c);
        return;
      case 'b':
        value.push_back('\b');
        return;
      case 'f':
        value.push_back('\f');
        return;
      case 'n':
        value.push_back('\n');
        return;
      case 'r':
        value.push_back('\r');
        return;
      case 't':
        value.push_back('\t');
        return;
      case 'u':
        append_code_point(value);
        return;
      default:
        fail("has an unknown escape in a string");
    }
  }

  // Behind "\u": four hex digits, and the second half of a surrogate pair where one follows. A lone
  // surrogate is kept as such, as JSON readers in Python do.
  void append_code_point(std::string& value) {
    uint32_t code_point = hex4();
    if (is_high_surrogate(code_point) && text_.substr(at_).starts_with("\\u")) {
      const auto low = text_.size() - at_ >= 6 ? hex_value(text_.substr(at_ + 2, 4)) : std::nullopt;
      if (low && is_low_surrogate(*low)) {
        code_point = 0x10000 + ((code_point - 0xD800) << 10) + (*low - 0xDC00);
        at_ += 6;
      }
    }
    append_utf8(value, code_point);
  }

  uint32_t hex4() {
    const auto value = at_ + 4 <= text_.size() ? hex_value(text_.substr(at_, 4)) : std::nullopt;
    if (!value) fail("has an unknown escape in a string");
    at_ += 4;
    return *value;
  }

  std::string_view stored_;
  std::string_view text_;
  size_t at_ = 0;
};

void append_hex_escape(std::string& out, uint32_t code_unit) {
  constexpr char kDigits[] = "0123456789abcdef";
  out += "\\u";
  for (int shift = 12; shift >= 0; shift -= 4) out.push_back(kDigits[code_unit >> shift & 0xF]);
}

void append_json_code_point(std::string& out, uint32_t c) {
  switch (c) {
    case '"':
      out += "\\\"";
      return;
    case '\\':
      out += "\\\\";
      return;
    case '\b':
      out += "\\b";
      return;
    case '\f':
      out += "\\f";
      return;
    case '\n':
      out += "\\n";
      return;
    case '\r':
      out += "\\r";
      return;
    case '\t':
      out += "\\t";
      return;
    default:
      break;
  }
  if (c >= 0x20 && c < 0x7F) {
    out.push_back(static_cast<char>(c));
  } else if (c < 0x10000) {
    append_hex_escape(out, c);
  } else {
    append_hex_escape(out, 0xD800 + ((c - 0x10000) >> 10));
    append_hex_escape(out, 0xDC00 + ((c - 0x10000) & 0x3FF));
  }
}

void append_json_string(std::string& out, std::string_view text) {
  out.push_back('"');
  while (!text.empty()) {
    const Utf8Step step = decode_utf8(text, /*allow_surrogates=*/true);
    if (step.nbytes == 0) throw Error(Errc::invalid_argument, "a tensor name is not valid UTF-8");
    append_json_code_point(out, step.code_point);
    text.remove_prefix(step.nbytes);
  }
  out.push_back('"');
}

std::string encode_structured(const TensorPath& path) {
  std::string out = {kStructuredMarker, '['};
  for (const PathComponent& component : path) {
    if (out.size() > 2) out.push_back(',');
    if (const auto* text = std::get_if<std::string>(&component)) {
      append_json_string(out, *text);
    } else {
      out += std::get<PathIndex>(component).digits;
    }
  }
  out.push_back(']');
  return out;
}

// Appends the printable form of `text` until `out` has `limit` bytes; returns how much of it was
// used.
size_t append_printable(std::string& out, std::string_view text, size_t limit) {
  constexpr char kDigits[] = "0123456789abcdef";
  size_t at = 0;
  while (at < text.size() && out.size() < limit) {
    const Utf8Step step = decode_utf8(text.substr(at));
    const uint32_t c = step.code_point;
    const bool printable = step.nbytes > 0 && c >= 0x20 && !(c >= 0x7F && c < 0xA0) &&
                           !(c >= 0x2000 && c <= 0x206F) && c != 0xFEFF;
    const size_t taken = std::max<size_t>(step.nbytes, 1);
    if (printable) {
      out += text.substr(at, taken);
    } else {
      for (char byte : text.substr(at, taken)) {
        out += "\\x";
        out.push_back(kDigits[static_cast<uint8_t>(byte) >> 4]);
        out.push_back(kDigits[static_cast<uint8_t>(byte) & 0xF]);
      }
    }
    at += taken;
  }
  return at;
}

}  // namespace

TensorPath decode_name(std::string_view stored) {
  if (stored.empty()) throw Error(Errc::malformed, "tensor name is empty");
  const auto fail = [&](const char* problem) {
    throw Error(Errc::malformed, "tensor name " + display_name(stored) + " " + problem);
  };
  if (!is_utf8(stored)) fail("is not UTF-8");
  if (!is_structured_name(stored)) return {std::string(stored)};
  if (stored.size() < 3 || stored[1] != '[' || stored.back() != ']') fail("is not a JSON array");
  if (stored.find_first_of("\n\r") != std::string_view::npos) fail("has a line break in its array");
  return ArrayParser(stored, stored.substr(1)).parse();
}

std::string encode_name(const TensorPath& path) {
  const auto* single = path.size() == 1 ? std::get_if<std::string>(&path.front()) : nullptr;
  const bool plain =
      single != nullptr && !single->empty() && !is_structured_name(*single) && is_utf8(*single);
  std::string name = plain ? *single : encode_structured(path);
  check_fits(name, kNameLength, name.size(), kMaxNameNbytes);
  return name;
}

void check_fits(std::string_view stored_name, const char* what, uint64_t found, uint64_t limit) {
  if (found > limit)
    throw Error(Errc::out_of_range, "tensor " + display_name(stored_name) + ": " + what + " is " +
                                        std::to_string(found) + ", at most " +
                                        std::to_string(limit) + " fits");
}

std::string display_name(std::string_view stored) {
  constexpr size_t kHead = 64;
  constexpr size_t kTail = 24;
  const bool structured = is_structured_name(stored);
  const std::string_view text = structured ? stored.substr(1) : stored;
  std::string shown = structured ? "" : "'";
  const size_t used = append_printable(shown, text, kHead);
  std::string_view rest = text.substr(used);
  if (rest.size() > kTail) {
    rest.remove_prefix(rest.size() - kTail);
    while (!rest.empty() && (static_cast<uint8_t>(rest.front()) & 0xC0) == 0x80)
      rest.remove_prefix(1);
    shown += "...";
  }
  append_printable(shown, rest, shown.size() + kTail);
  if (!structured) shown.push_back('\'');
  return shown;
}

}  // namespace tensorizer::format
