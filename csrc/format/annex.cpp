#include "format/annex.h"

#include <algorithm>
#include <bitset>
#include <cstring>

#include "core/byte_cursor.h"
#include "core/byte_writer.h"
#include "core/endian.h"
#include "core/error.h"
#include "format/crypt_info.h"
#include "format/prologue.h"

namespace tensorizer::format {
namespace {

constexpr std::string_view kAnnexMagic = "TZRANNX1";
constexpr uint64_t kFrameNbytes = 8 + 4 + 4;  // magic, length, checksum
constexpr uint8_t kMustKnow = 1;
constexpr uint8_t kTagAlgorithm = 1;
constexpr uint64_t kTagNbytes = 2 + sizeof(FileTag::tag);
constexpr uint64_t kSignatureNbytes = sizeof(Signature::public_key) + sizeof(Signature::signature);
// The prologue's bytes that a digest covers: version and flags; tensor count and metadata length.
constexpr size_t kVersionAt = 5, kTensorSizeAt = 41, kCountAt = 57;

std::vector<TextPair> read_texts(std::span<const std::byte> body, uint64_t origin,
                                 std::string_view what, Annex& annex) {
  if (body.size() > kMaxMetadataNbytes)
    throw Error(Errc::malformed, std::string(what) + " of " + std::to_string(body.size()) +
                                     " bytes, at most " + std::to_string(kMaxMetadataNbytes) +
                                     " are legal");
  const char* const first = reinterpret_cast<const char*>(body.data());
  std::vector<char>& text = annex.texts.emplace_back(first, first + body.size());
  JsonReader json(text, what, origin);
  std::vector<TextPair> pairs = read_text_object(json, what);
  json.finish();
  return pairs;
}

class SectionReader {
 public:
  enum class Place { index, sealed, detached };
  SectionReader(std::span<const std::byte> sections, uint64_t origin, Place place,
                std::optional<uint64_t> entries)
      : sections_(sections), cursor_(sections, "annex", origin), place_(place), entries_(entries) {}

  Annex read(const std::function<digest::Sha256()>& index_digest) {
    while (cursor_.remaining() > 0) {
      const size_t begin = cursor_.position();
      const auto type = cursor_.read_le<uint8_t>("section type");
      const auto flags = cursor_.read_le<uint8_t>("section flags");
      const auto nbytes = cursor_.read_le<uint32_t>("section length");
      const uint64_t at = cursor_.offset();
      const auto body = cursor_.take(nbytes, "section");
      if (!is_known(type)) {
        if ((flags & kMustKnow) != 0)
          cursor_.fail("section type", "a section of type " + std::to_string(type) +
                                           ", which its reader must know, and this one does not");
        continue;
      }
      if (seen_[type])
        cursor_.fail("section type", "type " + std::to_string(type) + " occurs twice");
      seen_[type] = true;
      const auto section = static_cast<SectionType>(type);
      if (section == SectionType::index_digest) {
        accept_digest(body, sections_.first(begin), index_digest());
      } else {
        accept(section, body, at);
        uncovered_ = uncovered_ || (annex_.digest && section < SectionType::authentication);
      }
    }
    if (annex_.metadata && !annex_.sealed.empty())
      cursor_.fail("section", "metadata both in clear and sealed");
    // Otherwise an attacker without the key could add content that the tag seems to cover.
    if (uncovered_ && (annex_.tag || !annex_.signatures.empty()))
      cursor_.fail("section", "content behind the index digest, in an authenticated file");
    return std::move(annex_);
  }

 private:
  // Sealed sections contain metadata; a detached signature contains digests and signatures.
  bool is_known(uint8_t number) const {
    const auto type = static_cast<SectionType>(number);
    if (type < SectionType::metadata || type > SectionType::signatures) return false;
    const bool metadata = type == SectionType::metadata;
    const bool detached = type == SectionType::records || type == SectionType::index_digest ||
                          type == SectionType::signatures;
    if (place_ == Place::sealed && !metadata)
      cursor_.fail("section type", "type " + std::to_string(number) + " cannot be sealed");
    if (place_ == Place::detached && !detached)
      cursor_.fail("section type", "type " + std::to_string(number) + " in a detached signature");
    return true;
  }

  void accept(SectionType type, std::span<const std::byte> body, uint64_t at) {
    switch (type) {
      case SectionType::metadata:
        annex_.metadata = read_texts(body, at, "metadata", annex_);
        return;
      case SectionType::ties:
        annex_.ties = read_texts(body, at, "ties", annex_);
        return;
      case SectionType::records:
        accept_records(body);
        return;
      case SectionType::authentication:
        need_digests();
        annex_.tag = read_tag(body, at);
        return;
      case SectionType::signatures:
        need_digests();
        accept_signatures(body, at);
        return;
      case SectionType::sealed:
      case SectionType::index_digest:
        if (body.empty()) cursor_.fail("section", "a sealed section without content");
        annex_.sealed.assign(body.begin(), body.end());
    }
  }

  void accept_records(std::span<const std::byte> body) {
    // Divided, not multiplied: the count is the prologue's.
    const uint64_t count = body.size() / sizeof(digest::Sha256Digest);
    if (body.empty() || body.size() % sizeof(digest::Sha256Digest) != 0 ||
        count != entries_.value_or(count))
      cursor_.fail("records", std::to_string(body.size()) + " bytes of digests" +
                                  (entries_ ? " for " + std::to_string(*entries_) + " tensors"
                                            : std::string()));
    annex_.records.resize(count);
    std::memcpy(annex_.records.data(), body.data(), body.size());
  }

  void need_digests() const {
    if (annex_.records.empty() || !annex_.digest)
      cursor_.fail("section", "without the digests that it is about in front of it");
  }

  FileTag read_tag(std::span<const std::byte> body, uint64_t at) const {
    ByteCursor cursor(body, "authentication", at);
    const auto algorithm = cursor.read_le<uint8_t>("algorithm");
    if (algorithm != kTagAlgorithm)
      throw Error(Errc::crypto,
                  "authentication: algorithm " + std::to_string(algorithm) + " is not known", {},
                  at);
    const auto kind = cursor.read_le<uint8_t>("kind");
    if (kind > 1) cursor.fail("kind", "kind " + std::to_string(kind) + " is not known");
    FileTag tag;
    if (kind == 1) tag.derivation = read_derivation(cursor);
    std::ranges::copy(cursor.take(tag.tag.size(), "tag"), tag.tag.begin());
    if (cursor.remaining() > 0)
      cursor.fail("tag", std::to_string(cursor.remaining()) + " bytes too many");
    return tag;
  }

  void accept_signatures(std::span<const std::byte> body, uint64_t at) {
    const size_t count = body.size() / kSignatureNbytes;
    if (body.size() % kSignatureNbytes != 0 || count == 0 || count > kMaxSignatures)
      cursor_.fail("signatures", std::to_string(body.size()) + " bytes, expected 1 to " +
                                     std::to_string(kMaxSignatures) + " times " +
                                     std::to_string(kSignatureNbytes));
    ByteCursor cursor(body, "signatures", at);
    for (size_t i = 0; i < count; ++i) {
      Signature& signature = annex_.signatures.emplace_back();
      std::ranges::copy(cursor.take(signature.public_key.size(), "public key"),
                        signature.public_key.begin());
      std::ranges::copy(cursor.take(signature.signature.size(), "signature"),
                        signature.signature.begin());
    }
  }

  void accept_digest(std::span<const std::byte> body, std::span<const std::byte> before,
                     digest::Sha256 digest) {
    digest::Sha256Digest stored;
    if (body.size() != stored.size())
      cursor_.fail("index digest", "it has " + std::to_string(body.size()) + " bytes, expected 32");
    std::ranges::copy(body, stored.begin());
    digest.update(before);
    annex_.digest = stored;
    annex_.computed = digest.finish();
  }

  std::span<const std::byte> sections_;
  ByteCursor cursor_;
  Place place_;
  std::optional<uint64_t> entries_;  // nullopt: any number of them
  bool uncovered_ = false;           // something follows the digest that it should cover
  std::bitset<256> seen_;
  Annex annex_;
};

void put_section(std::vector<std::byte>& out, SectionType type, std::span<const std::byte> body) {
  ByteWriter section(out);
  section.put(static_cast<uint8_t>(type));
  section.put(uint8_t{0});
  section.put(static_cast<uint32_t>(body.size()));
  section.put_bytes(body);
}

void put_tag(std::vector<std::byte>& out, const FileTag& tag) {
  std::vector<std::byte> body;
  ByteWriter writer(body);
  writer.put(kTagAlgorithm);
  writer.put(static_cast<uint8_t>(tag.derivation.has_value()));
  if (tag.derivation) put_derivation(writer, *tag.derivation);
  writer.put_bytes(tag.tag);
  put_section(out, SectionType::authentication, body);
}

void put_signatures(std::vector<std::byte>& out, std::span<const Signature> signatures) {
  std::vector<std::byte> body;
  ByteWriter writer(body);
  for (const Signature& signature : signatures) {
    writer.put_bytes(signature.public_key);
    writer.put_bytes(signature.signature);
  }
  put_section(out, SectionType::signatures, body);
}

std::string text_of(SectionType type, std::span<const TextPair> pairs) {
  std::string text;
  append_text_object(text, pairs);
  if (text.size() > kMaxMetadataNbytes)
    throw Error(Errc::out_of_range, (type == SectionType::ties ? "ties of " : "metadata of ") +
                                        std::to_string(text.size()) + " bytes, at most " +
                                        std::to_string(kMaxMetadataNbytes) + " fit");
  return text;
}

void put_texts(std::vector<std::byte>& out, SectionType type, std::span<const TextPair> pairs) {
  const std::string text = text_of(type, pairs);
  put_section(out, type, std::as_bytes(std::span(text)));
}

}  // namespace

digest::Sha256 digest_index(std::span<const std::byte> prologue,
                            std::span<const std::byte> entries) {
  digest::Sha256 digest;
  digest.update(prologue.subspan(kVersionAt, kTensorSizeAt - kVersionAt));
  digest.update(prologue.subspan(kCountAt, kPrologueNbytes - kCountAt));
  digest.update(entries);
  return digest;
}

std::optional<uint64_t> annex_nbytes_at(std::span<const std::byte> begin) {
  const auto magic = std::as_bytes(std::span(kAnnexMagic));
  const size_t shown = std::min(begin.size(), magic.size());
  if (!std::ranges::equal(begin.first(shown), magic.first(shown))) return shown;
  if (begin.size() < magic.size() + sizeof(uint32_t)) return std::nullopt;
  const auto nbytes = load_le<uint32_t>(&begin[magic.size()]);
  return magic.size() + sizeof nbytes + nbytes + sizeof(uint32_t);
}

namespace {

std::optional<Annex> read_frame(std::span<const std::byte> slack, uint64_t origin,
                                SectionReader::Place place, std::optional<uint64_t> entries,
                                const std::function<digest::Sha256()>& index_digest) {
  const auto magic = std::as_bytes(std::span(kAnnexMagic));
  if (slack.size() < magic.size() || !std::ranges::equal(slack.first(magic.size()), magic))
    return std::nullopt;
  ByteCursor cursor(slack, "annex", origin);
  cursor.take(magic.size(), "magic");
  const auto nbytes = cursor.read_le<uint32_t>("length");
  const auto sections = cursor.take(nbytes, "sections");
  const auto covered = slack.first(cursor.position());
  const auto stored = cursor.read_le<uint32_t>("checksum");
  if (digest::crc32(0, covered) != stored)
    cursor.fail("checksum", "its checksum does not fit: it is damaged");
  return SectionReader(sections, origin + magic.size() + sizeof nbytes, place, entries)
      .read(index_digest);
}

}  // namespace

std::optional<Annex> parse_annex(std::span<const std::byte> slack, uint64_t origin,
                                 uint64_t entries,
                                 const std::function<digest::Sha256()>& index_digest) {
  return read_frame(slack, origin, SectionReader::Place::index, entries, index_digest);
}

Annex parse_detached(std::span<const std::byte> file, const digest::Sha256& signed_bytes) {
  auto annex = read_frame(file, 0, SectionReader::Place::detached, std::nullopt,
                          [&] { return signed_bytes; });
  if (!annex || annex->signatures.empty())
    throw Error(Errc::malformed, "a detached signature that holds none");
  if (annex_nbytes_at(file) != file.size())
    throw Error(Errc::malformed, "a detached signature with more bytes than it says");
  return std::move(*annex);
}

Annex parse_sealed(std::span<const std::byte> sections) {
  return SectionReader(sections, 0, SectionReader::Place::sealed, 0).read({});
}

std::vector<std::byte> serialize_metadata(std::span<const TextPair> metadata) {
  std::vector<std::byte> out;
  put_texts(out, SectionType::metadata, metadata);
  return out;
}

std::vector<std::byte> serialize_annex(const AnnexToWrite& annex, std::span<const std::byte> sealed,
                                       const digest::Sha256& index_digest, const SignDigest& sign) {
  std::vector<std::byte> sections;
  if (!annex.metadata.empty() && sealed.empty())
    put_texts(sections, SectionType::metadata, annex.metadata);
  if (!annex.ties.empty()) put_texts(sections, SectionType::ties, annex.ties);
  if (!sealed.empty()) put_section(sections, SectionType::sealed, sealed);
  if (!annex.records.empty())
    put_section(sections, SectionType::records, std::as_bytes(annex.records));
  digest::Sha256 stream = index_digest;
  stream.update(sections);
  const digest::Sha256Digest digest = stream.finish();
  put_section(sections, SectionType::index_digest, digest);
  if (sign) {
    const Signatures signatures = sign(digest);
    if (signatures.tag) put_tag(sections, *signatures.tag);
    if (!signatures.signatures.empty()) put_signatures(sections, signatures.signatures);
  }

  std::vector<std::byte> out;
  out.reserve(sections.size() + kFrameNbytes);
  ByteWriter annex_out(out);
  annex_out.put_bytes(std::as_bytes(std::span(kAnnexMagic)));
  annex_out.put(static_cast<uint32_t>(sections.size()));
  annex_out.put_bytes(sections);
  annex_out.put(digest::crc32(0, out));
  return out;
}

uint64_t annex_nbytes(const AnnexToWrite& annex, uint64_t sealed_overhead, uint64_t entries,
                      const SignaturesToCome& to_come) {
  const bool records = to_come.records || to_come.tag || to_come.signatures > 0;
  if (annex.metadata.empty() && annex.ties.empty() && !records) return 0;
  uint64_t nbytes = kFrameNbytes + kSectionPrefixNbytes + digest::Sha256Digest{}.size();
  const auto add = [&nbytes](SectionType type, std::span<const TextPair> pairs) {
    if (!pairs.empty()) nbytes += kSectionPrefixNbytes + text_of(type, pairs).size();
  };
  add(SectionType::metadata, annex.metadata);
  add(SectionType::ties, annex.ties);
  if (records) nbytes += kSectionPrefixNbytes + sizeof(digest::Sha256Digest) * entries;
  if (to_come.tag)
    nbytes += kSectionPrefixNbytes + kTagNbytes + (to_come.derivation ? kDerivationNbytes : 0);
  if (to_come.signatures > 0)
    nbytes += kSectionPrefixNbytes + kSignatureNbytes * to_come.signatures;
  if (!annex.metadata.empty()) nbytes += sealed_overhead;
  if (nbytes > UINT32_MAX)
    throw Error(Errc::out_of_range, "more tensors than an authenticated file can hold");
  return nbytes;
}

}  // namespace tensorizer::format
