#include "format/prologue.h"

#include <algorithm>

#include "core/byte_cursor.h"
#include "core/endian.h"
#include "core/error.h"

namespace tensorizer::format {

namespace {

constexpr size_t kFlagsNbytes = 32;

void check_magic(std::span<const std::byte> bytes, uint64_t origin) {
  if (bytes.size() >= kMagic.size() && std::ranges::equal(bytes.first(kMagic.size()), kMagic))
    return;
  if (bytes.empty()) throw Error(Errc::malformed, "not a tensors file: it is empty", {}, origin);
  if (bytes.size() < kMagic.size())
    throw Error(Errc::malformed,
                "not a tensors file: " + std::to_string(bytes.size()) +
                    " bytes where the magic |TZR| wants 5",
                {}, origin);
  throw Error(Errc::malformed, "not a tensors file: the magic |TZR| is missing", {}, origin);
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
