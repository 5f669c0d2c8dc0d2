// Whether a file is what its key or a signature vouches for: checked for the index when it is
// opened, and for each record when its header is read.
//
// Whoever opens a file calls check_tag() or the signature checks. Who forgets that gets no tensor
// of an authenticated encrypted file: its nonces say that there has to be a tag. Source:
// docs/format.md, "Authentication".
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <stop_token>
#include <vector>

#include "crypto/authentication.h"
#include "format/annex.h"
#include "format/record_header.h"
#include "load/key_ring.h"
#include "load/open_index.h"

namespace tensorizer::load {

// The index digest, of the bytes that were read. REQUIRES: a .tensors file.
digest::Sha256Digest index_digest(const OpenedIndex& opened);

// Compares the tag with the key that `keys` have for it, where the file has one. Throws Error:
// authentication (wrong key, altered), crypto (no such key), out_of_memory.
void check_tag(OpenedIndex& opened, KeyRing& keys);

// Of an encrypted file that nobody vouches for: where tensors come without data, which have no
// nonce to tell where they are from, one with data is asked instead. Throws Error: authentication
// (it belongs to an authenticated file), and what reading a record header throws.
void check_marks(io::RangeSource& source, const OpenedIndex& opened, KeyRing& keys,
                 const std::stop_token& stop);

// What was found among the signatures at hand. `by_wanted_key`: one of them, at least, is right.
enum class Signed { not_at_all, by_other_keys, by_wanted_key };
// Throws Error(authentication) where signatures by wanted keys are there and none is right.
Signed check_embedded_signatures(OpenedIndex& opened,
                                 std::span<const crypto::PublicKeyBytes> wanted);
// Of a file beside it. Throws, besides, Error(malformed).
Signed check_detached_signatures(OpenedIndex& opened, std::span<const std::byte> file,
                                 std::span<const crypto::PublicKeyBytes> wanted);
// The signatures that a detached file holds of this one; none where it is of another content.
// Throws Error(malformed).
std::vector<format::Signature> signatures_of(const OpenedIndex& opened,
                                             std::span<const std::byte> file);

// What a signature is about: the digest of each record header, in index order; and the entries
// whose data nothing would bind to it, since the file is in clear and they have no SHA-256.
struct RecordDigests {
  std::vector<digest::Sha256Digest> headers;
  std::vector<uint32_t> unbound;
};
RecordDigests digest_records(io::RangeSource& source, const OpenedIndex& opened,
                             const std::stop_token& stop);

// Serializes a detached signature of the file, whose record headers have the digests `records`.
// `more` are kept beside the new one.
std::vector<std::byte> sign_detached(const OpenedIndex& opened,
                                     std::span<const digest::Sha256Digest> records,
                                     const crypto::Signer& signer,
                                     std::span<const format::Signature> more);

// The only way from the bytes of a record header to its fields: compared with the digest that
// somebody vouches for, parsed, held against the index. The result borrows `bytes`. Throws Error:
// authentication, malformed, crypto.
format::RecordHeader accept_record(const OpenedIndex& opened, uint32_t entry,
                                   std::span<const std::byte> bytes);

// The key of a record's payload or of sealed metadata. Throws Error: authentication (they come from
// an authenticated file, and this one is none), crypto, out_of_memory.
std::shared_ptr<const crypto::SecretKey> key_of(const OpenedIndex& opened, KeyRing& keys,
                                                const format::CryptInfo& info);

// Decrypts the sealed section of the file's annex, metadata that an encrypted file has under its
// tensors' key. REQUIRES: it has one. Throws Error: crypto
// (wrong key, altered), malformed.
format::Annex open_sealed(const OpenedIndex& opened, KeyRing& keys);

}  // namespace tensorizer::load
