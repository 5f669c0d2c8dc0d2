#include "format/tensor_path.h"

#include <algorithm>

#include "core/error.h"
#include "format/json.h"
#include "format/utf8.h"

namespace tensorizer::format {
namespace {

// A flat array of strings and integers; other values are refused where they begin.
TensorPath parse_array(std::string text) {
  JsonReader json(text, "its JSON array", 0, JsonReader::LoneSurrogates::kept);
  TensorPath path;
  json.array("a path", [&] {
    if (json.next_is('"')) {
      path.emplace_back(std::string(json.string("a component")));
      return;
    }
    const std::string_view digits = json.digits("a component that is no string");
    if (digits.size() > kMaxIndexDigits)
      json.fail("an index of " + std::to_string(digits.size()) + " digits");
    path.emplace_back(PathIndex{std::string(digits)});
  });
  json.finish();
  if (path.empty()) json.fail("no components");
  return path;
}

std::string encode_structured(const TensorPath& path) {
  std::string out = {kStructuredMarker, '['};
  for (const PathComponent& component : path) {
    if (out.size() > 2) out.push_back(',');
    if (const auto* text = std::get_if<std::string>(&component)) {
      append_json_string(out, *text, /*ascii=*/true);
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
    const Utf8Char next = decode_utf8(text.substr(at));
    const uint32_t c = next.code_point;
    const bool printable = next.nbytes > 0 && c >= 0x20 && !(c >= 0x7F && c < 0xA0) &&
                           !(c >= 0x2000 && c <= 0x206F) && c != 0xFEFF;
    const size_t taken = std::max<size_t>(next.nbytes, 1);
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
  try {
    return parse_array(std::string(stored.substr(1)));
  } catch (const Error& error) {
    throw Error(Errc::malformed, "tensor name " + display_name(stored) + ": " + error.what());
  }
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
