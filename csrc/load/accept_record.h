// The only ways from the bytes of a record header to its fields, and to the key of its payload:
// both compare them with what was authenticated when the file was opened (sign/authenticity). Pure.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "crypto/secret_key.h"
#include "format/crypt_info.h"
#include "format/record_header.h"
#include "load/key_ring.h"
#include "load/open_index.h"

namespace tensorizer::load {

// Throws Error(malformed) if the index leaves more room for a record header than one can need.
void check_header_nbytes(const format::IndexEntry& entry, bool encrypted);

bool has_sha256(const format::RecordHeader& header) noexcept;

// Parses a record header and compares it with its authenticated digest, if the file has one, and
// with the index. The result borrows `bytes`. Throws Error: authentication or, without a key
// or signature, hash_mismatch; malformed, crypto.
format::RecordHeader accept_record(const OpenedIndex& opened, uint32_t entry,
                                   std::span<const std::byte> bytes);

// The key of a record's payload or of sealed metadata. Throws Error: authentication (they belong to
// an authenticated file, but this file has no tag that was checked), crypto, out_of_memory.
std::shared_ptr<const crypto::SecretKey> key_of(const OpenedIndex& opened, KeyRing& keys,
                                                const format::CryptInfo& info);

}  // namespace tensorizer::load
