// JSON as the header of a safetensors file, the bodies of an annex and structured names use it. One
// pass over text that the caller owns: strings are unescaped where they stand, which never makes
// them longer. Strict: RFC 8259 without exceptions, UTF-8 only; nothing recurses. Confined to one
// thread.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/error.h"

namespace tensorizer::format {

// One pair of texts; borrows the text it was read from.
struct TextPair {
  std::string_view key;
  std::string_view value;
  bool operator==(const TextPair&) const = default;
};

// The same with texts of its own.
using OwnedPair = std::pair<std::string, std::string>;

class JsonReader {
 public:
  // An escaped surrogate that is no half of a pair is an error, or stays one, as JSON readers of
  // Python keep it.
  enum class LoneSurrogates : uint8_t { refused, kept };

  // `what` names the text in messages; `origin` is the position of its first byte in the source.
  // Throws Error(malformed) if the text is not UTF-8.
  JsonReader(std::span<char> text, std::string_view what, uint64_t origin,
             LoneSurrogates lone = LoneSurrogates::refused);

  // Takes `c` behind blanks, if it is next.
  bool take(char c) noexcept;
  void expect(char c, std::string_view where);
  bool take_null() noexcept;
  bool next_is(char c) noexcept;
  // A string, unescaped. The view borrows the text.
  std::string_view string(std::string_view where);
  // A number of 0 to 2^64 - 1 in its only spelling: no sign, point, exponent or leading zero.
  uint64_t integer(std::string_view where);
  // The same of any size, as its digits; -0 is 0. The view borrows the text.
  std::string_view digits(std::string_view where);
  // Any value, checked and forgotten; at most 127 containers deep, as the reference reads them.
  void skip_value();
  // Nothing but blanks may follow.
  void finish();

  // Calls on_member(key) for each member of an object; it takes the value.
  template <class OnMember>
  void object(std::string_view where, OnMember&& on_member) {
    expect('{', where);
    if (take('}')) return;
    do {
      const std::string_view key = string("a name");
      expect(':', "a name");
      on_member(key);
    } while (take(','));
    expect('}', where);
  }

  // Calls on_element() for each element of an array; it takes the value.
  template <class OnElement>
  void array(std::string_view where, OnElement&& on_element) {
    expect('[', where);
    if (take(']')) return;
    do {
      on_element();
    } while (take(','));
    expect(']', where);
  }

  [[noreturn]] void fail(const std::string& problem) const;

 private:
  void skip_blanks() noexcept;
  void skip_literal(std::string_view literal);
  void skip_number();
  void skip_scalar();
  char* unescape(char* out);
  uint32_t hex4();
  uint64_t offset() const noexcept { return origin_ + static_cast<uint64_t>(at_ - begin_); }

  char* begin_;
  char* at_;
  char* end_;
  std::string_view what_;
  uint64_t origin_;
  LoneSurrogates lone_;
};

// An object of texts, in the order of its members: {"key":"text", ...}. A key that occurs twice is
// malformed.
std::vector<TextPair> read_text_object(JsonReader& json, std::string_view where);

// The first name that occurs twice, if any. In time O(n log n) whatever the names are.
std::optional<std::string_view> find_duplicate(std::span<const std::string_view> names);

// Appends `text` in quotes, with \" \\ \b \t \n \f \r and \u00xx below U+0020; the rest raw, or, in
// `ascii`, as \uxxxx from U+007F on. Throws Error(invalid_argument) for ASCII of text that is not
// UTF-8 (lone surrogates are let pass).
void append_json_string(std::string& out, std::string_view text, bool ascii = false);
// Appends a compact object of texts.
void append_text_object(std::string& out, std::span<const TextPair> pairs);

}  // namespace tensorizer::format
