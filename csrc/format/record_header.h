// The header in front of each payload. Pure; bytes <-> values.
// Source: docs/format.md, "Record header", "Hashes".
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "digest/digest.h"
#include "format/crypt_info.h"
#include "format/index.h"

namespace tensorizer::format {

enum class HashType : uint8_t { crc32 = 0, sha256 = 1 };

struct StoredHash {
  HashType type;
  std::span<const std::byte> value;  // as stored; borrows the header bytes
};

struct RecordHeader {
  uint16_t module_idx = 0;
  TensorType type = TensorType::state_dict;
  std::string_view name;
  std::string_view dtype;
  std::vector<uint64_t> shape;
  std::vector<StoredHash> hashes;         // in stored order, duplicates kept
  std::span<const std::byte> hash_block;  // the bytes that contain them, behind their length
  std::optional<CryptInfo> crypt;         // set iff the file has crypt_info
  // Bytes [crypt_begin, crypt_end) of the header are crypt_info with the length in front of it; the
  // hashes leave them out. Both are the end of the hash block where the file has no crypt_info.
  uint64_t crypt_begin = 0;
  uint64_t crypt_end = 0;
  uint64_t data_nbytes = 0;
};

// An upper bound of the record header of this entry, from its name, rank, hashes and MACs and at
// most 1 MiB of padding. A larger distance in the index is damage.
uint64_t max_record_header_nbytes(const IndexEntry& entry, bool has_crypt_info) noexcept;

// Parses a whole record header: `bytes` are all header_nbytes() of it, at `entry.offset`. The
// result borrows `bytes`. Throws Error: malformed, crypto.
RecordHeader parse_record_header(std::span<const std::byte> bytes, const IndexEntry& entry,
                                 bool has_crypt_info);

// The header against its index entry: header size, name (as a path: the spellings may differ),
// type-dependent naming, dtype, shape, lengths, with the exceptions of format.md 5.5 (index dtype
// without torch name, index shape (1,) for a scalar without data). Throws Error(malformed) naming
// the tensor, wanted and found.
void check_against_index(const RecordHeader& header, const IndexEntry& entry);

// The hashes of a hash block, which they borrow. Throws Error(malformed).
std::vector<StoredHash> parse_hash_block(std::span<const std::byte> block, uint64_t origin = 0);

// The kinds that are among the hashes of a header.
digest::HashChoice stored_kinds(const RecordHeader& header) noexcept;

// The digests of the header part of the hash input: all bytes with every hash value zeroed, without
// crypt_info. Both are ready to take the payload.
digest::HeaderDigest digest_header(std::span<const std::byte> bytes, const RecordHeader& header,
                                   digest::HashChoice hashes);

// Compares the stored hashes with the computed ones (nullptr: kind not computed because not
// stored). Throws Error(hash_mismatch) naming tensor, kind, expected and found value; a CRC32 that
// is not 4 bytes long or a SHA-256 that is not 32 is a mismatch too.
void check_hashes(const RecordHeader& header, const uint32_t* crc32,
                  const digest::Sha256Digest* sha256);

// --- writing ---

// A record header to be written; hash values and MACs are zero until filled in through the offsets.
struct HeaderLayout {
  std::vector<std::byte> bytes;             // the whole header, padding included
  uint64_t crc32_at = 0;                    // offset of the 4-byte value; 0: not present
  uint64_t sha256_at = 0;                   // offset of the 32-byte value; 0: not present
  uint64_t crypt_begin = 0, crypt_end = 0;  // as in RecordHeader
  uint64_t macs_at = 0;                     // offset of the first MAC; 0: no MACs
};

struct HeaderToWrite {
  uint16_t module_idx;
  TensorType type;
  std::string_view name;
  std::string_view dtype;  // full string, torch name included
  std::span<const uint64_t> shape;
  bool wide_dims;
  digest::HashChoice hashes;
  bool has_crypt_info;                    // the file is encrypted
  std::span<const std::byte> crypt_info;  // serialized with its prefix when has_crypt_info
  uint64_t data_nbytes;
};

// Size without padding; the caller pads so that offset + size is aligned.
uint64_t record_header_nbytes(const HeaderToWrite& header) noexcept;
HeaderLayout serialize_record_header(const HeaderToWrite& header, uint64_t padded_nbytes);

// The digest of the header part as the writer sees it (hash values are still zero in layout.bytes).
digest::HeaderDigest digest_header(const HeaderLayout& layout, digest::HashChoice hashes);

}  // namespace tensorizer::format
