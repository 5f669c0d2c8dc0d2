// Checks an opened index against the key of the file and against signatures. What was checked is
// noted in OpenedIndex::authenticated; from then on load/accept_record compares each record header
// with it.
//
// If no check is made, no tensor of an authenticated encrypted file can be loaded: the marks of its
// nonces show that it must have a tag. Source: docs/format.md, "Authentication".
#pragma once

#include <cstddef>
#include <span>
#include <stop_token>

#include "crypto/authentication.h"
#include "format/annex.h"
#include "load/key_ring.h"
#include "load/open_index.h"

namespace tensorizer::sign {

// The digest of the index, computed from the bytes that were read. REQUIRES: a .tensors file.
digest::Sha256Digest index_digest(const load::OpenedIndex& opened);

// Compares the tag with the key that `keys` have for it, if the file has a tag. Throws Error:
// authentication (wrong key, altered), crypto (no such key), out_of_memory.
void check_tag(load::OpenedIndex& opened, load::KeyRing& keys);

// For an encrypted file without a checked tag or signature. Tensors without data have no nonce that
// could show that the file must have a tag; if there are any, one tensor with data is examined
// instead. Throws Error: authentication (it belongs to an authenticated file), and what reading a
// record header throws.
void check_marks(io::RangeSource& source, const load::OpenedIndex& opened, load::KeyRing& keys,
                 const std::stop_token& stop);

// Which signatures were found. `by_wanted_key`: at least one of them is right.
enum class Signed { not_at_all, by_other_keys, by_wanted_key };
// Throws Error(authentication) if there are signatures by wanted keys, but none of them is right.
Signed check_embedded_signatures(load::OpenedIndex& opened,
                                 std::span<const crypto::PublicKeyBytes> wanted);
// The same for a detached signature, whose bytes are `file`. Throws, besides, Error(malformed).
Signed check_detached_signatures(load::OpenedIndex& opened, std::span<const std::byte> file,
                                 std::span<const crypto::PublicKeyBytes> wanted);

// For a file whose index digest the caller has compared with one that was told elsewhere: from now
// on, record headers must have the digests that it covers. Throws Error(malformed): there are none.
void bind_records(load::OpenedIndex& opened);

// Decrypts the sealed section of the file's annex: the metadata of an encrypted file, under the key
// of its tensors. REQUIRES: it has one. Throws Error: crypto (wrong key, altered), malformed.
format::Annex open_sealed(const load::OpenedIndex& opened, load::KeyRing& keys);

}  // namespace tensorizer::sign
