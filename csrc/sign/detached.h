// Detached signatures: files beside a .tensors file that hold the digests of its records and
// signatures of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <stop_token>
#include <vector>

#include "crypto/authentication.h"
#include "format/annex.h"
#include "load/open_index.h"

namespace tensorizer::sign {

// What precedes the sections in the digest of a detached signature.
digest::Sha256 begin_detached_digest(const load::OpenedIndex& opened);

// The signatures that a detached file holds for the index of this file, right or wrong; empty if it
// was made for another index. Throws Error(malformed).
std::vector<format::Signature> signatures_of(const load::OpenedIndex& opened,
                                             std::span<const std::byte> file);

// What a detached signature covers: the digest of each record header, in the order of the index.
// `unbound` are the entries that it cannot cover: their data are in clear and have no SHA-256.
struct SignedRecords {
  std::vector<digest::Sha256Digest> headers;
  std::vector<uint32_t> unbound;
};
SignedRecords digest_records(io::RangeSource& source, const load::OpenedIndex& opened,
                             const std::stop_token& stop);

// The signatures in a detached file that are right for a file with this index and these records.
// Empty if there are none, or if `file` is not a detached signature.
std::vector<format::Signature> valid_signatures(const load::OpenedIndex& opened,
                                                const SignedRecords& records,
                                                std::span<const std::byte> file);

// Signs a file with this index and these records, and returns the detached file. It also contains
// `kept`, other signatures of the same content. REQUIRES: nothing is unbound. Throws
// Error(invalid_argument) if they are too many.
std::vector<std::byte> sign_detached(const load::OpenedIndex& opened, const SignedRecords& records,
                                     const crypto::Signer& signer,
                                     std::span<const format::Signature> kept);

}  // namespace tensorizer::sign
