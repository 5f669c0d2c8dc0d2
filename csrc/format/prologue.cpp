#include "format/prologue.h"

#include <algorithm>
#include <string_view>

#include "core/byte_cursor.h"
#include "core/endian.h"
#include "core/error.h"

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

namespace {

constexpr size_t kFlagsNbytes = 32;

void check_magic(std::span<const std::byte> bytes, uint64_t origin) {
  if (bytes.size() >= kMagic.size() && std::ranges::equal(bytes.first(kMagic.size()), kMagic))
    return;
  if (bytes.size() < kMagic.size())
    throw Error(Errc::malformed,
                "not a tensors file: " + std::to_string(bytes.size()) +
                    " bytes where the magic |TZR| wants 5",
                {}, origin);
  std::string text = "not a tensors file: the magic |TZR| is missing";
  if (const std::string_view hint = foreign_format(bytes); !hint.empty())
    text.append("; ").append(hint);
  throw Error(Errc::malformed, text, {}, origin);
}

// The whole 256-bit field must be 0..3, in every version.
uint32_t check_flags(std::span<const std::byte> field, uint64_t at) {
  const auto low = std::to_integer<uint32_t>(field[0]);
  const bool high_clear =
      std::ranges::all_of(field.subspan(1), [](std::byte b) { return b == std::byte{0}; });
  if (high_clear && low <= (kFlagEncrypted | kFlagVersionedHeaders)) return low;
  throw Error(Errc::malformed,
              "unknown feature flags: only encryption (1) and versioned headers (2) are known, so "
              "a newer release "
              "wrote this file or it is damaged",
              {}, at);
}

void check_encryption(const Prologue& prologue, KeyGiven key, uint64_t origin) {
  if (prologue.has_crypt_info() && key == KeyGiven::no) {
    throw Error(Errc::crypto, "the file is encrypted, and no decryption was asked for", {}, origin);
  }
  if (!prologue.has_crypt_info() && key == KeyGiven::yes) {
    throw Error(Errc::crypto,
                "decryption was asked for, but the file is not encrypted (data version " +
                    std::to_string(prologue.version) + ")",
                {}, origin);
  }
}

}  // namespace

Prologue parse_prologue(std::span<const std::byte> bytes, uint64_t origin, KeyGiven key) {
  check_magic(bytes, origin);
  ByteCursor cursor(bytes, "prologue", origin, Errc::truncated);
  cursor.take(kMagic.size(), "magic");
  Prologue prologue;
  const uint64_t version_at = cursor.offset();
  prologue.version = cursor.read_le<uint32_t>("data version");
  if (prologue.version < kVersionPlain || prologue.version > kVersionLong) {
    Error error(Errc::unsupported,
                "data version " + std::to_string(prologue.version) +
                    " is not supported: versions 1, 2, 3, 4 and 5 are",
                {}, version_at);
    error.version = prologue.version;
    throw error;
  }
  const uint64_t flags_at = cursor.offset();
  const auto flags = cursor.take(kFlagsNbytes, "feature flags");
  prologue.tensor_size = cursor.read_le<uint64_t>("tensor size");
  cursor.take(8, "reserved");
  prologue.tensor_count = cursor.read_le<uint64_t>("tensor count");
  prologue.metadata_nbytes = cursor.read_le<uint64_t>("metadata length");

  prologue.flags = check_flags(flags, flags_at);
  check_encryption(prologue, key, origin);
  if ((prologue.flags & kFlagVersionedHeaders) != 0 && prologue.version < kVersionLong) {
    throw Error(Errc::malformed,
                "the flag for versioned headers (2) needs data version 5, the file says " +
                    std::to_string(prologue.version),
                {}, flags_at);
  }
  return prologue;
}

std::array<std::byte, kPrologueNbytes> serialize_prologue(const Prologue& prologue) {
  std::array<std::byte, kPrologueNbytes> bytes{};
  std::ranges::copy(kMagic, bytes.begin());
  store_le(&bytes[5], prologue.version);
  store_le(&bytes[9], prologue.flags);
  store_le(&bytes[41], prologue.tensor_size);
  store_le(&bytes[57], prologue.tensor_count);
  store_le(&bytes[65], prologue.metadata_nbytes);
  return bytes;
}

}  // namespace tensorizer::format
