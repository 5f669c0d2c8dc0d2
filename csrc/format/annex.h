// The annex of a file: metadata, ties, and the tag and signatures of the file, in
// sections behind the last index entry, where every earlier reader finds slack. A detached
// signature is an annex too, in a file of its own. Pure; bytes <-> values. Source: docs/format.md,
// "Annex".
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "digest/digest.h"
#include "format/crypt_info.h"
#include "format/index.h"
#include "format/json.h"
#include "format/safetensors.h"

namespace tensorizer::format {

enum class SectionType : uint8_t {
  metadata = 1,
  ties = 2,
  sealed = 3,
  index_digest = 4,
  records = 5,         // SHA-256 of each record header
  authentication = 6,  // of the index digest, under the file's key
  signatures = 7,      // of the index digest
};

inline constexpr uint64_t kSectionPrefixNbytes = 6;  // type, flags, length
inline constexpr uint64_t kMaxMetadataNbytes = 100'000'000;
inline constexpr size_t kMaxSignatures = 16;

// Section 6.
struct FileTag {
  std::optional<KeyDerivation> derivation;  // how the key comes from a passphrase
  std::array<std::byte, 32> tag{};
};

// Of section 7: an Ed25519 public key and a signature by it.
struct Signature {
  std::array<std::byte, 32> public_key{};
  std::array<std::byte, 64> signature{};
  bool operator==(const Signature&) const = default;
};

// The sections of an annex, or those that were sealed in one. Movable only: texts borrow from the
// bytes.
struct Annex {
  Metadata metadata;
  std::vector<TextPair> ties;                  // alias -> target, stored names
  std::vector<std::byte> sealed;               // crypt_info block with its prefix, then ciphertext
  std::optional<digest::Sha256Digest> digest;  // as stored, of the index and the sections before it
  std::optional<digest::Sha256Digest> computed;  // as computed from the file
  std::vector<digest::Sha256Digest>
      records;                        // of each entry's record header, where they are stored
  std::optional<FileTag> tag;         // only with `records` and `digest`
  std::vector<Signature> signatures;  // likewise

  Annex() = default;
  Annex(Annex&&) noexcept = default;
  Annex& operator=(Annex&&) noexcept = default;

  std::vector<std::vector<char>> texts;  // what metadata and ties borrow
};

// The part of the index that the digest covers, ahead of the sections: `prologue` are the 73 bytes
// of the container's start, `entries` all index entries.
digest::Sha256 digest_index(std::span<const std::byte> prologue,
                            std::span<const std::byte> entries);

// The size of the annex whose first bytes are `begin`. If they are no annex, the number of bytes
// that show it. nullopt if `begin` is too short to tell.
std::optional<uint64_t> annex_nbytes_at(std::span<const std::byte> begin);

// Reads the annex at the beginning of `slack`, the bytes behind the last entry; nullopt if there is
// no annex. `origin` is its position in the source; `index_digest` gives digest_index()
// where it is needed, of `entries` entries. Throws Error: malformed (a wrong length or checksum, a
// section twice, one that says that its reader must know it and is not known, a body that is not of
// its type, content that a tag or signature does not cover), crypto (another kind of tag).
std::optional<Annex> parse_annex(std::span<const std::byte> slack, uint64_t origin,
                                 uint64_t entries,
                                 const std::function<digest::Sha256()>& index_digest);

// Reads a detached signature: a file that holds nothing but an annex of the sections 5, 4 and 7, of
// a file of any number of entries. `signed_bytes` is the digest of the bytes before the sections:
// digest_index(), then the annex of the signed file, from magic to checksum, if it has one. Throws
// Error(malformed).
Annex parse_detached(std::span<const std::byte> file, const digest::Sha256& signed_bytes);

// Reads the sections that were sealed: metadata, and sections that may be skipped. Throws
// Error(malformed).
Annex parse_sealed(std::span<const std::byte> sections);

// Writing. Empty where there is neither metadata nor a tie.
struct AnnexToWrite {
  std::vector<TextPair> metadata;
  std::vector<TextPair> ties;
  std::span<const digest::Sha256Digest> records{};  // of each entry's record header
};
// The tag and the signatures of a digest, made when it is known.
struct Signatures {
  std::optional<FileTag> tag;
  std::vector<Signature> signatures;
};
// Which of them there will be, known before.
struct SignaturesToCome {
  bool records = false;  // section 5, which a tag and signatures have in any case
  bool tag = false;
  bool derivation = false;  // of the tag's key
  size_t signatures = 0;
};
// Sections that contain only metadata, to be sealed.
std::vector<std::byte> serialize_metadata(std::span<const TextPair> metadata);
// `sealed`, if not empty, is written in place of the metadata.
using SignDigest = std::function<Signatures(const digest::Sha256Digest&)>;
std::vector<std::byte> serialize_annex(const AnnexToWrite& annex, std::span<const std::byte> sealed,
                                       const digest::Sha256& index_digest,
                                       const SignDigest& sign = {});
// Bytes of serialize_annex for a file of `entries` entries; `sealed_overhead` is the number of
// bytes that sealing adds to the metadata section, 0 where it is in clear. 0: the file has no
// annex. Throws Error(out_of_range) beyond kMaxMetadataNbytes.
uint64_t annex_nbytes(const AnnexToWrite& annex, uint64_t sealed_overhead, uint64_t entries = 0,
                      const SignaturesToCome& to_come = {});

}  // namespace tensorizer::format
