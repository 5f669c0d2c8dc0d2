#include "format/foreign.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <string_view>

#include "core/endian.h"

namespace tensorizer::format {
namespace {

using namespace std::string_view_literals;

constexpr auto kLfsStart = "version https://git-lfs"sv;
constexpr uint64_t kMaxSafetensorsHeader = 100'000'000;  // the limit of that format

char lower(char c) noexcept { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; }

// Without regard to case; blanks and a byte order mark in front are skipped.
bool begins_with_markup(std::string_view text, std::string_view tag) noexcept {
  if (text.starts_with("\xEF\xBB\xBF"sv)) text.remove_prefix(3);
  text.remove_prefix(std::min(text.find_first_not_of(" \t\r\n"sv), text.size()));
  return text.size() >= tag.size() &&
         std::ranges::equal(text.substr(0, tag.size()), tag, {}, lower);
}

bool is_safetensors(std::span<const std::byte> head) noexcept {
  return head.size() > 8 && load_le<uint64_t>(head.data()) <= kMaxSafetensorsHeader &&
         head[8] == std::byte{'{'};
}

// The word behind `key` at the beginning of a line, where it is complete and nothing but letters,
// digits and colons: the text is not ours.
std::string lfs_field(std::string_view text, std::string_view key) {
  const size_t at = text.find(key);
  if (at == std::string_view::npos) return "unknown";
  text.remove_prefix(at + key.size());
  const size_t end = text.find('\n');
  const auto plain = [](char c) {
    return (c >= '0' && c <= '9') || (lower(c) >= 'a' && lower(c) <= 'z') || c == ':';
  };
  if (end == std::string_view::npos || end == 0 || !std::ranges::all_of(text.substr(0, end), plain))
    return "unknown";
  return std::string(text.substr(0, end));
}

}  // namespace

bool begins_lfs_pointer(std::span<const std::byte> head) noexcept {
  return std::string_view(reinterpret_cast<const char*>(head.data()), head.size())
      .starts_with(kLfsStart);
}

std::string foreign_format(std::span<const std::byte> head) {
  const std::string_view text(reinterpret_cast<const char*>(head.data()), head.size());
  if (begins_lfs_pointer(head))
    return "it is a Git LFS pointer to " + lfs_field(text, "\noid "sv) + " of " +
           lfs_field(text, "\nsize "sv) + " bytes: `git lfs pull` fetches the file itself";
  if (begins_with_markup(text, "<!doctype html"sv) || begins_with_markup(text, "<html"sv))
    return "it is an HTML page, perhaps of a login or an error: check the address and the "
           "permissions";
  if (begins_with_markup(text, "<?xml"sv))
    return "it is an XML document, perhaps the error message of an object store";
  if (text.starts_with("PK\x03\x04"sv))
    return "it is a zip archive, as torch.save writes it: read it with torch.load and write it "
           "with TensorSerializer";
  // Before torch.save wrote archives, its files began with a pickled magic number.
  if (text.starts_with("\x80\x02\x8A\x0A\x6C\xFC\x9C\x46"sv))
    return "it is a file of an old torch.save: read it with torch.load and write it with "
           "TensorSerializer";
  if (text.starts_with("\x1F\x8B"sv))
    return "it is compressed with gzip: unpack it first; a server must send it as it is";
  if (is_safetensors(head))
    return "it is a safetensors file: read it with safetensors.torch.load_file and write it with "
           "TensorSerializer";
  return {};
}

}  // namespace tensorizer::format
