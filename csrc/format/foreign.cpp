#include "format/foreign.h"

#include <algorithm>

namespace tensorizer::format {
namespace {

using namespace std::string_view_literals;

constexpr char lower(char c) noexcept {
  return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
}

// Without regard to case; blanks and a byte order mark in front are skipped.
bool begins_with_markup(std::string_view text, std::string_view tag) noexcept {
  if (text.starts_with("\xEF\xBB\xBF"sv)) text.remove_prefix(3);
  text.remove_prefix(std::min(text.find_first_not_of(" \t\r\n"sv), text.size()));
  return text.size() >= tag.size() &&
         std::ranges::equal(text.substr(0, tag.size()), tag, {}, lower);
}

}  // namespace

std::string_view foreign_format(std::span<const std::byte> head) noexcept {
  const std::string_view text(reinterpret_cast<const char*>(head.data()), head.size());
  if (begins_with_markup(text, "<!doctype html"sv) || begins_with_markup(text, "<html"sv))
    return "it is an HTML page, perhaps of a login or an error: check the address and the "
           "permissions"sv;
  if (begins_with_markup(text, "<?xml"sv))
    return "it is an XML document, perhaps the error message of an object store"sv;
  if (text.starts_with("PK\x03\x04"sv))
    return "it is a zip archive, as torch.save writes it: read it with torch.load and write it "
           "with TensorSerializer"sv;
  // Before torch.save wrote archives, its files began with a pickled magic number.
  if (text.starts_with("\x80\x02\x8A\x0A\x6C\xFC\x9C\x46"sv))
    return "it is a file of an old torch.save: read it with torch.load and write it with "
           "TensorSerializer"sv;
  if (text.starts_with("\x1F\x8B"sv))
    return "it is compressed with gzip: unpack it first; a server must send it as it is"sv;
  return {};
}

}  // namespace tensorizer::format
