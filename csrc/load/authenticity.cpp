#include "load/authenticity.h"

#include <algorithm>
#include <numeric>
#include <string>

#include "core/byte_cursor.h"
#include "core/error.h"
#include "crypto/chunked_box.h"
#include "format/crypt_info.h"
#include "load/load_plan.h"

namespace tensorizer::load {
namespace {

using digest::Sha256;
using digest::Sha256Digest;
using format::Annex;
using format::Signature;

[[noreturn]] void refuse(const std::string& what) { throw Error(Errc::authentication, what); }

Sha256 digest_begin(const OpenedIndex& opened) {
  return format::digest_index(opened.prologue_bytes, opened.index.entry_bytes());
}

// What comes before the sections in the digest of a detached signature.
Sha256 detached_begin(const OpenedIndex& opened) {
  Sha256 digest = digest_begin(opened);
  if (opened.annex) {
    const auto slack = opened.index.slack();
    digest.update(slack.first(*format::annex_nbytes_at(slack)));
  }
  return digest;
}

// From here on record headers have to have these digests.
void vouch(OpenedIndex& opened, const Annex& annex) {
  std::vector<Sha256Digest>& records = opened.vouched.records;
  if (!records.empty() && records != annex.records)
    refuse("two of its signatures and codes are about different records");
  records = annex.records;
}

void check_digest(const Annex& annex) {
  if (annex.digest != annex.computed)
    refuse("the index does not match its digest: the file was altered");
}

void check_header_nbytes(const format::IndexEntry& entry, bool encrypted) {
  if (entry.header_nbytes() > format::max_record_header_nbytes(entry, encrypted))
    throw Error(Errc::malformed, "the index leaves " + std::to_string(entry.header_nbytes()) +
                                     " bytes for a record header, which is too much");
}

bool has_sha256(const format::RecordHeader& header) {
  return std::ranges::any_of(header.hashes, [](const format::StoredHash& hash) {
    return hash.type == format::HashType::sha256;
  });
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
  vouch(opened, annex);
  auto& signers = opened.vouched.signers;
  signers.insert(signers.end(), right.begin(), right.end());
  return Signed::by_wanted_key;
}

}  // namespace

Sha256Digest index_digest(const OpenedIndex& opened) {
  if (opened.annex && opened.annex->computed) return *opened.annex->computed;
  return digest_begin(opened).finish();
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
  vouch(opened, annex);
  opened.vouched.by_key = true;
}

void check_marks(io::RangeSource& source, const OpenedIndex& opened, KeyRing& keys,
                 const std::stop_token& stop) {
  if (!opened.prologue.has_crypt_info()) return;
  const auto& entries = opened.index.entries();
  if (std::ranges::none_of(entries, &format::IndexEntry::zero_filled)) return;
  const auto found = std::ranges::find_if(
      entries, [](const format::IndexEntry& entry) { return entry.data_nbytes > 0; });
  if (found == entries.end()) return;
  check_header_nbytes(*found, true);
  std::vector<std::byte> bytes(found->header_nbytes());
  source.read_at(found->offset, io::Slice(bytes), stop);
  const auto entry = static_cast<uint32_t>(found - entries.begin());
  const format::RecordHeader header = accept_record(opened, entry, bytes);
  if (header.crypt) key_of(opened, keys, *header.crypt);
}

Signed check_embedded_signatures(OpenedIndex& opened,
                                 std::span<const crypto::PublicKeyBytes> wanted) {
  return opened.annex ? check_signatures(opened, *opened.annex, wanted) : Signed::not_at_all;
}

Signed check_detached_signatures(OpenedIndex& opened, std::span<const std::byte> file,
                                 std::span<const crypto::PublicKeyBytes> wanted) {
  const Annex annex = format::parse_detached(file, detached_begin(opened));
  return check_signatures(opened, annex, wanted);
}

std::vector<Signature> signatures_of(const OpenedIndex& opened, std::span<const std::byte> file) {
  Annex annex = format::parse_detached(file, detached_begin(opened));
  if (annex.digest != annex.computed) return {};
  return std::move(annex.signatures);
}

RecordDigests digest_records(io::RangeSource& source, const OpenedIndex& opened,
                             const std::stop_token& stop) {
  std::vector<uint32_t> entries(opened.index.size());
  std::iota(entries.begin(), entries.end(), 0U);
  const bool encrypted = opened.prologue.has_crypt_info();
  for (const format::IndexEntry& entry : opened.index.entries())
    check_header_nbytes(entry, encrypted);
  const LoadPlan plan = plan_headers(opened.index, entries, source.traits());
  RecordDigests found;
  found.headers.resize(entries.size());
  std::vector<std::byte> image;
  for (const Unit& unit : plan.units) {
    image.resize(unit.nbytes);
    source.read_at(unit.offset, io::Slice(image), stop);
    for (const Piece& piece : plan.pieces_of(unit)) {
      const auto bytes = std::span(image).subspan(piece.unit_offset, piece.nbytes);
      const format::RecordHeader header = accept_record(opened, piece.target, bytes);
      Sha256 digest;
      digest.update(bytes);
      found.headers[piece.target] = digest.finish();
      if (!encrypted && header.data_nbytes > 0 && !has_sha256(header))
        found.unbound.push_back(piece.target);
    }
  }
  return found;
}

std::vector<std::byte> sign_detached(const OpenedIndex& opened,
                                     std::span<const Sha256Digest> records,
                                     const crypto::Signer& signer,
                                     std::span<const Signature> more) {
  format::AnnexToWrite annex;
  annex.records = records;
  const auto vouch_for = [&](const Sha256Digest& digest) {
    format::Vouchers vouchers;
    vouchers.signatures.assign(more.begin(), more.end());
    const crypto::PublicKeyBytes key = signer.public_key();
    std::erase_if(vouchers.signatures, [&](const Signature& s) { return s.public_key == key; });
    if (vouchers.signatures.size() >= format::kMaxSignatures)
      throw Error(Errc::invalid_argument, "it has " + std::to_string(format::kMaxSignatures) +
                                              " signatures, and no room for one more");
    vouchers.signatures.push_back({key, signer.sign(crypto::signed_message(digest))});
    return vouchers;
  };
  return format::serialize_annex(annex, {}, detached_begin(opened), vouch_for);
}

format::RecordHeader accept_record(const OpenedIndex& opened, uint32_t entry,
                                   std::span<const std::byte> bytes) {
  const format::IndexEntry& listed = opened.index[entry];
  if (!opened.vouched.records.empty()) {
    Sha256 digest;
    digest.update(bytes);
    if (digest.finish() != opened.vouched.records[entry])
      refuse("its record is not the one that the file was authenticated with");
  }
  const bool encrypted = opened.prologue.has_crypt_info();
  format::RecordHeader header = format::parse_record_header(bytes, listed, encrypted);
  format::check_against_index(header, listed);
  // Of a signed file the data are as good as their digest: a CRC-32 can be kept by whoever wants
  // to.
  if (opened.binds_data_by_digests() && header.data_nbytes > 0 && !has_sha256(header))
    refuse("it was signed without a SHA-256 of its data");
  return header;
}

std::shared_ptr<const crypto::SecretKey> key_of(const OpenedIndex& opened, KeyRing& keys,
                                                const format::CryptInfo& info) {
  auto key = keys.key_for(info.derivations);
  if (!opened.vouched.by_key && info.cipher && keys.has_marked(info.cipher->nonce, *key))
    refuse(
        "it belongs to an authenticated file, but this one has no authentication code that was "
        "checked: it was altered");
  return key;
}

format::Annex open_sealed(const OpenedIndex& opened, KeyRing& keys) {
  ByteCursor cursor(opened.annex->sealed, "sealed metadata");
  const auto nbytes = cursor.read_le<uint64_t>("crypt_info length");
  const format::CryptInfo info = format::parse_crypt_info(cursor.take(nbytes, "crypt_info"), 0);
  const auto cipher = cursor.take(cursor.remaining(), "ciphertext");
  if (!info.cipher || info.cipher->macs.size() != crypto::kMacNbytes)
    throw Error(Errc::crypto, "sealed metadata: wanted one message with one authentication code");
  std::vector<std::byte> plain(cipher.size());
  const auto mac = info.cipher->macs.first<crypto::kMacNbytes>();
  if (!crypto::open(plain, cipher, mac, crypto::NonceView(info.cipher->nonce),
                    *key_of(opened, keys, info)))
    throw Error(
        Errc::crypto,
        "sealed metadata does not match its authentication code: wrong key, or the file was "
        "altered");
  return format::parse_sealed(plain);
}

}  // namespace tensorizer::load
