#include "load/accept_record.h"

#include <algorithm>
#include <string>

#include "core/error.h"
#include "digest/digest.h"

namespace tensorizer::load {

void check_header_nbytes(const format::IndexEntry& entry, bool encrypted) {
  const uint64_t most = format::max_record_header_nbytes(entry, encrypted);
  if (entry.header_nbytes() > most)
    throw Error(Errc::malformed, "the index leaves " + std::to_string(entry.header_nbytes()) +
                                     " bytes for its record header, expected at most " +
                                     std::to_string(most));
}

bool has_sha256(const format::RecordHeader& header) noexcept {
  return std::ranges::any_of(header.hashes, [](const format::StoredHash& hash) {
    return hash.type == format::HashType::sha256;
  });
}

format::RecordHeader accept_record(const OpenedIndex& opened, uint32_t entry,
                                   std::span<const std::byte> bytes) {
  const format::IndexEntry& listed = opened.index[entry];
  if (!opened.authenticated.records.empty()) {
    digest::Sha256 digest;
    digest.update(bytes);
    if (digest.finish() != opened.authenticated.records[entry]) {
      if (!opened.authenticated.by_key && opened.authenticated.signers.empty())
        throw Error(Errc::hash_mismatch, "its record header does not match its digest");
      throw Error(Errc::authentication,
                  "its record is not the one that the file was authenticated with");
    }
  }
  const bool encrypted = opened.prologue.has_crypt_info();
  format::RecordHeader header = format::parse_record_header(bytes, listed, encrypted);
  format::check_against_index(header, listed);
  // An attacker can change the data of a signed file and keep their CRC32.
  if (opened.binds_data_by_digests() && header.data_nbytes > 0 && !has_sha256(header))
    throw Error(Errc::authentication, "it was signed without a SHA-256 of its data");
  return header;
}

std::shared_ptr<const crypto::SecretKey> key_of(const OpenedIndex& opened, KeyRing& keys,
                                                const format::CryptInfo& info) {
  auto key = keys.key_for(info.derivations);
  if (!opened.authenticated.by_key && info.cipher && keys.has_marked(info.cipher->nonce, *key))
    throw Error(
        Errc::authentication,
        "it belongs to an authenticated file, but this one has no authentication code that was "
        "checked: it was altered");
  return key;
}

}  // namespace tensorizer::load
