// Metadata that an encrypted file seals with its tensors' key.
#pragma once

#include "format/annex.h"
#include "load/key_ring.h"
#include "load/open_index.h"

namespace tensorizer::load {

// Decrypts the sealed section of the file's annex. REQUIRES: it has one. Throws Error: crypto
// (wrong key, altered), malformed.
format::Annex open_sealed(const OpenedIndex& opened, KeyRing& keys);

}  // namespace tensorizer::load
