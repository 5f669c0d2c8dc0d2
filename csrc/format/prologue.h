// The first 73 bytes of a file: magic, data version, feature flags, counters, length of the
// metadata block. Pure. Source: docs/format.md, "Prologue" and "Data versions".
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace tensorizer::format {

inline constexpr uint64_t kPrologueNbytes = 73;
inline constexpr std::array<std::byte, 5> kMagic = {
    std::byte{0x7C}, std::byte{0x54}, std::byte{0x5A}, std::byte{0x52}, std::byte{0x7C}};

// Data versions, named after the feature that first needed them.
inline constexpr uint32_t kVersionPlain = 1;
inline constexpr uint32_t kVersionOpaque = 2;
inline constexpr uint32_t kVersionEncrypted = 3;
inline constexpr uint32_t kVersionMeta = 4;
inline constexpr uint32_t kVersionLong = 5;

// Feature flags, meaningful from version 4 on.
inline constexpr uint32_t kFlagEncrypted = 1;
inline constexpr uint32_t kFlagVersionedHeaders = 2;

struct Prologue {
  uint32_t version = kVersionPlain;
  uint32_t flags = 0;        // 0..3
  uint64_t tensor_size = 0;  // informative: sum of the payload bytes
  uint64_t tensor_count = 0;
  uint64_t metadata_nbytes = 0;

  // Every record header of the file has a crypt_info block.
  bool has_crypt_info() const noexcept {
    return version == kVersionEncrypted ||
           (version >= kVersionMeta && (flags & kFlagEncrypted) != 0);
  }
  // Every index entry starts with an entry version.
  bool tagged_entries() const noexcept {
    return version >= kVersionLong && (flags & kFlagVersionedHeaders) != 0;
  }
};

// Whether the caller gave a key; decides which of two equally true errors is reported.
enum class KeyGiven : bool { no, yes };

// Reads the prologue from the first bytes of a container (fewer than kPrologueNbytes when the
// source is shorter). `origin` is their position in the source. Checks in this order: magic;
// version; length; unknown flags; encryption against `key`; flag bit 1 against the version
// (format.md 2.2). Throws Error: malformed (not a tensors file, bad flags), unsupported (version),
// truncated, crypto (a key for a plain file, or no key for an encrypted one).
Prologue parse_prologue(std::span<const std::byte> bytes, uint64_t origin, KeyGiven key);

// The 73 bytes of `prologue`.
std::array<std::byte, kPrologueNbytes> serialize_prologue(const Prologue& prologue);

}  // namespace tensorizer::format
