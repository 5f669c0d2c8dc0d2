#include "sign/authenticity.h"

#include <algorithm>
#include <string>
#include <vector>

#include "core/byte_cursor.h"
#include "core/error.h"
#include "crypto/chunked_box.h"
#include "format/crypt_info.h"
#include "load/accept_record.h"
#include "sign/detached.h"

namespace tensorizer::sign {
namespace {

using digest::Sha256Digest;
using format::Annex;
using format::Signature;
using load::KeyRing;
using load::OpenedIndex;

[[noreturn]] void refuse(const std::string& what) { throw Error(Errc::authentication, what); }

// From now on, record headers must have these digests.
void note_records(OpenedIndex& opened, const Annex& annex) {
  std::vector<Sha256Digest>& records = opened.authenticated.records;
  if (!records.empty() && records != annex.records)
    refuse("two of its signatures and codes are about different records");
  records = annex.records;
}

void check_digest(const Annex& annex) {
  if (annex.digest != annex.computed)
    refuse("the index does not match its digest: the file was altered");
}

Signed check_signatures(OpenedIndex& opened, const Annex& annex,
                        std::span<const crypto::PublicKeyBytes> wanted) {
  if (annex.signatures.empty()) return Signed::not_at_all;
  bool by_wanted = false;
  std::vector<crypto::PublicKeyBytes> right;
  for (const Signature& one : annex.signatures) {
    if (std::ranges::find(wanted, one.public_key) == wanted.end()) continue;
    by_wanted = true;
    if (crypto::verify(one.signature, crypto::signed_message(*annex.computed), one.public_key))
      right.push_back(one.public_key);
  }
  if (!by_wanted) return Signed::by_other_keys;
  if (right.empty() || annex.records.size() != opened.index.size())
    refuse("the signature does not match: the file was altered, or the signature");
  check_digest(annex);
  note_records(opened, annex);
  auto& signers = opened.authenticated.signers;
  signers.insert(signers.end(), right.begin(), right.end());
  return Signed::by_wanted_key;
}

}  // namespace

Sha256Digest index_digest(const OpenedIndex& opened) {
  if (opened.annex && opened.annex->computed) return *opened.annex->computed;
  return format::digest_index(opened.prologue_bytes, opened.index.entry_bytes()).finish();
}

void check_tag(OpenedIndex& opened, KeyRing& keys) {
  if (!opened.annex || !opened.annex->tag) return;
  const Annex& annex = *opened.annex;
  const auto& derivation = annex.tag->derivation;
  const auto key = keys.key_for(derivation ? std::span(&*derivation, 1)
                                           : std::span<const format::KeyDerivation>());
  const crypto::Tag tag =
      crypto::make_tag(*annex.computed, crypto::derive_subkey(*key, crypto::KeyUse::tag));
  if (!crypto::same_secret(tag, annex.tag->tag))
    refuse("the index does not match its authentication code: wrong key, or the file was altered");
  check_digest(annex);
  note_records(opened, annex);
  opened.authenticated.by_key = true;
}

void check_marks(io::RangeSource& source, const OpenedIndex& opened, KeyRing& keys,
                 const std::stop_token& stop) {
  if (!opened.prologue.has_crypt_info()) return;
  const auto& entries = opened.index.entries();
  if (std::ranges::none_of(entries, &format::IndexEntry::zero_filled)) return;
  const auto found = std::ranges::find_if(
      entries, [](const format::IndexEntry& entry) { return entry.data_nbytes > 0; });
  if (found == entries.end()) return;
  load::check_header_nbytes(*found, true);
  std::vector<std::byte> bytes(found->header_nbytes());
  source.read_at(found->offset, io::Buffer(bytes), stop);
  const auto entry = static_cast<uint32_t>(found - entries.begin());
  const format::RecordHeader header = load::accept_record(opened, entry, bytes);
  if (header.crypt) load::key_of(opened, keys, *header.crypt);
}

Signed check_embedded_signatures(OpenedIndex& opened,
                                 std::span<const crypto::PublicKeyBytes> wanted) {
  return opened.annex ? check_signatures(opened, *opened.annex, wanted) : Signed::not_at_all;
}

Signed check_detached_signatures(OpenedIndex& opened, std::span<const std::byte> file,
                                 std::span<const crypto::PublicKeyBytes> wanted) {
  const Annex annex = format::parse_detached(file, begin_detached_digest(opened));
  return check_signatures(opened, annex, wanted);
}

void bind_records(OpenedIndex& opened) {
  if (!opened.annex || opened.annex->records.size() != opened.index.size())
    throw Error(Errc::malformed, "its annex has no digests of its record headers");
  check_digest(*opened.annex);
  note_records(opened, *opened.annex);
}

format::Annex open_sealed(const OpenedIndex& opened, KeyRing& keys) {
  ByteCursor cursor(opened.annex->sealed, "sealed metadata");
  const auto nbytes = cursor.read_le<uint64_t>("crypt_info length");
  const format::CryptInfo info = format::parse_crypt_info(cursor.take(nbytes, "crypt_info"), 0);
  const auto cipher = cursor.take(cursor.remaining(), "ciphertext");
  if (!info.cipher || info.cipher->macs.size() != kMacNbytes)
    throw Error(Errc::crypto, "sealed metadata: expected one message with one authentication code");
  std::vector<std::byte> plain(cipher.size());
  const auto mac = info.cipher->macs.first<kMacNbytes>();
  if (!crypto::open(plain, cipher, mac, crypto::NonceView(info.cipher->nonce),
                    *load::key_of(opened, keys, info)))
    throw Error(
        Errc::crypto,
        "sealed metadata does not match its authentication code: wrong key, or the file was "
        "altered");
  return format::parse_sealed(plain);
}

}  // namespace tensorizer::sign
