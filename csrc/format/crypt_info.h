// The crypt_info block of a record header: how a payload was encrypted and its key derived. Pure;
// bytes <-> values. Source: docs/format.md, "crypt_info".
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/byte_cursor.h"
#include "core/byte_writer.h"
#include "core/format_sizes.h"

namespace tensorizer::format {

using Nonce = std::array<std::byte, kNonceNbytes>;

// Chunk type 1: Argon2id parameters, as stored; limits and salt are checked where they are used.
struct KeyDerivation {
  uint16_t method = 1;  // 1: libsodium pwhash
  uint64_t opslimit = 0;
  uint64_t memlimit = 0;  // bytes
  int32_t algorithm = 2;  // 2: Argon2id v1.3
  std::vector<std::byte> salt;
  bool operator==(const KeyDerivation&) const = default;
};

// Chunk types 2 (parallel) and 3 (sequential: one message, chunk_nbytes 0).
struct CipherChunks {
  uint64_t chunk_nbytes = 0;        // 0: the whole payload is one message
  Nonce nonce{};                    // of chunk 0; chunk i uses nonce + i
  std::span<const std::byte> macs;  // kMacNbytes each, in chunk order; borrows the parsed bytes
  size_t mac_count() const noexcept { return macs.size() / kMacNbytes; }
};

struct CryptInfo {
  std::vector<KeyDerivation> derivations;
  std::optional<CipherChunks> cipher;  // nullopt: payload is not encrypted (zero chunks)
};

// A derivation chunk with its length prefix, as writers make it: of exactly this size.
inline constexpr uint64_t kDerivationNbytes = 8 + 2 + 2 + 8 + 8 + 4 + 2 + kSaltNbytes;
// Throws Error(invalid_argument) for a salt of another length.
void put_derivation(ByteWriter& out, const KeyDerivation& derivation);
// Throws Error(malformed): another chunk type or method, other lengths.
KeyDerivation read_derivation(ByteCursor& cursor);

// Parses the block behind its u64 length prefix. Throws Error: malformed (lengths, unknown chunk or
// method, chunk size not a multiple of 64 or below 1024), crypto (chunks but no cipher, or several
// ciphers).
CryptInfo parse_crypt_info(std::span<const std::byte> block, uint64_t origin);

// Checks the cipher against the payload: mac_count == ceil(data_nbytes / chunk_nbytes) unless
// mac_count is 1, and the rules of format.md 7.4. Returns the effective chunk size (data_nbytes
// where one message covers all). Throws Error: crypto, malformed.
uint64_t check_crypt_info(const CryptInfo& info, uint64_t data_nbytes);

// Serializes with its u64 prefix; the MACs, which end it, are zero and filled in later.
std::vector<std::byte> serialize_crypt_info(const std::optional<KeyDerivation>& derivation,
                                            const Nonce& nonce, uint64_t macs);
std::vector<std::byte> serialize_empty_crypt_info();
// A block for one message (chunk type 3), with its MAC.
std::vector<std::byte> serialize_message_crypt_info(const std::optional<KeyDerivation>& derivation,
                                                    const Nonce& nonce,
                                                    std::span<const std::byte, kMacNbytes> mac);
uint64_t message_crypt_info_nbytes(bool derivation) noexcept;

}  // namespace tensorizer::format
