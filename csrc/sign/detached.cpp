#include "sign/detached.h"

#include <algorithm>
#include <numeric>
#include <string>

#include "core/error.h"
#include "load/accept_record.h"
#include "load/load_plan.h"
#include "sign/authenticity.h"

namespace tensorizer::sign {

using digest::Sha256;
using digest::Sha256Digest;
using format::Signature;
using load::OpenedIndex;

Sha256 begin_detached_digest(const OpenedIndex& opened) {
  Sha256 digest = format::digest_index(opened.prologue_bytes, opened.index.entry_bytes());
  if (opened.annex) {
    const auto slack = opened.index.slack();
    digest.update(slack.first(*format::annex_nbytes_at(slack)));
  }
  return digest;
}

std::vector<Signature> signatures_of(const OpenedIndex& opened, std::span<const std::byte> file) {
  format::Annex annex = format::parse_detached(file, begin_detached_digest(opened));
  if (annex.digest != annex.computed) return {};
  return std::move(annex.signatures);
}

SignedRecords digest_records(io::RangeSource& source, const OpenedIndex& opened,
                             const std::stop_token& stop) {
  std::vector<uint32_t> entries(opened.index.size());
  std::iota(entries.begin(), entries.end(), 0U);
  const bool encrypted = opened.prologue.has_crypt_info();
  for (const format::IndexEntry& entry : opened.index.entries())
    load::check_header_nbytes(entry, encrypted);
  const load::LoadPlan plan = load::plan_headers(opened.index, entries, source.traits());
  SignedRecords found;
  found.headers.resize(entries.size());
  std::vector<std::byte> image;
  for (const load::Unit& unit : plan.units) {
    image.resize(unit.nbytes);
    source.read_at(unit.offset, io::Buffer(image), stop);
    for (const load::Piece& piece : plan.pieces_of(unit)) {
      const auto bytes = std::span(image).subspan(piece.unit_offset, piece.nbytes);
      const format::RecordHeader header = load::accept_record(opened, piece.target, bytes);
      Sha256 digest;
      digest.update(bytes);
      found.headers[piece.target] = digest.finish();
      if (!encrypted && header.data_nbytes > 0 && !load::has_sha256(header))
        found.unbound.push_back(piece.target);
    }
  }
  return found;
}

std::vector<Signature> valid_signatures(const OpenedIndex& opened, const SignedRecords& records,
                                        std::span<const std::byte> file) {
  try {
    format::Annex annex = format::parse_detached(file, begin_detached_digest(opened));
    if (annex.digest != annex.computed || annex.records != records.headers) return {};
    const auto message = crypto::signed_message(*annex.computed);
    std::erase_if(annex.signatures, [&](const Signature& one) {
      return !crypto::verify(one.signature, message, one.public_key);
    });
    return std::move(annex.signatures);
  } catch (const Error& error) {
    if (error.code() != Errc::malformed && error.code() != Errc::crypto) throw;
    return {};
  }
}

std::vector<std::byte> sign_detached(const OpenedIndex& opened, const SignedRecords& records,
                                     const crypto::Signer& signer,
                                     std::span<const Signature> kept) {
  format::AnnexToWrite annex;
  annex.records = records.headers;
  const auto sign = [&](const Sha256Digest& digest) {
    format::Signatures signatures;
    auto& all = signatures.signatures;
    all.assign(kept.begin(), kept.end());
    const crypto::PublicKeyBytes key = signer.public_key();
    std::erase_if(all, [&](const Signature& s) { return s.public_key == key; });
    if (all.size() >= format::kMaxSignatures)
      throw Error(Errc::invalid_argument, "it has " + std::to_string(format::kMaxSignatures) +
                                              " signatures, and no room for one more");
    all.push_back({key, signer.sign(crypto::signed_message(digest))});
    return signatures;
  };
  return format::serialize_annex(annex, {}, begin_detached_digest(opened), sign);
}

}  // namespace tensorizer::sign
