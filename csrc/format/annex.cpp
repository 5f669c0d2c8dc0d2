#include "format/annex.h"

#include <algorithm>
#include <bitset>
#include <cstring>

#include "core/byte_cursor.h"
#include "core/byte_writer.h"
#include "core/endian.h"
#include "core/error.h"
#include "format/prologue.h"

namespace tensorizer::format {
namespace {

constexpr std::string_view kAnnexMagic = "TZRANNX1";
constexpr uint64_t kFrameNbytes = 8 + 4 + 4;  // magic, length, checksum
constexpr uint8_t kMustKnow = 1;
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
  SectionReader(std::span<const std::byte> sections, uint64_t origin, bool sealed)
      : sections_(sections), cursor_(sections, "annex", origin), sealed_(sealed) {}

  Annex read(const std::function<Sha256()>& index_digest) {
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
      if (static_cast<SectionType>(type) == SectionType::index_digest) {
        accept_digest(body, sections_.first(begin), index_digest());
      } else {
        accept(static_cast<SectionType>(type), body, at);
      }
    }
    if (annex_.metadata && !annex_.sealed.empty())
      cursor_.fail("section", "metadata both in clear and sealed");
    return std::move(annex_);
  }

 private:
  // Sealed sections hold metadata; the others have their place in the open.
  bool is_known(uint8_t type) const {
    if (type == static_cast<uint8_t>(SectionType::metadata)) return true;
    const bool known = type >= static_cast<uint8_t>(SectionType::ties) &&
                       type <= static_cast<uint8_t>(SectionType::index_digest);
    if (known && sealed_)
      cursor_.fail("section type", "type " + std::to_string(type) + " cannot be sealed");
    return known;
  }

  void accept(SectionType type, std::span<const std::byte> body, uint64_t at) {
    switch (type) {
      case SectionType::metadata:
        annex_.metadata = read_texts(body, at, "metadata", annex_);
        return;
      case SectionType::ties:
        annex_.ties = read_texts(body, at, "ties", annex_);
        return;
      default:
        if (body.empty()) cursor_.fail("section", "a sealed section without content");
        annex_.sealed.assign(body.begin(), body.end());
    }
  }

  void accept_digest(std::span<const std::byte> body, std::span<const std::byte> before,
                     Sha256 digest) {
    Sha256Digest stored;
    if (body.size() != stored.size())
      cursor_.fail("index digest", "it has " + std::to_string(body.size()) + " bytes, wanted 32");
    std::ranges::copy(body, stored.begin());
    digest.update(before);
    annex_.digest = stored;
    annex_.computed = digest.finish();
  }

  std::span<const std::byte> sections_;
  ByteCursor cursor_;
  bool sealed_;
  std::bitset<256> seen_;
  Annex annex_;
};

void check_section(SectionType type, uint64_t nbytes) {
  if (nbytes > kMaxMetadataNbytes)
    throw Error(Errc::out_of_range, (type == SectionType::ties ? "ties of " : "metadata of ") +
                                        std::to_string(nbytes) + " bytes, at most " +
                                        std::to_string(kMaxMetadataNbytes) + " fit");
}

void put_section(std::vector<std::byte>& out, SectionType type, std::span<const std::byte> body) {
  check_section(type, body.size());
  ByteWriter section(out);
  section.put(static_cast<uint8_t>(type));
  section.put(uint8_t{0});
  section.put(static_cast<uint32_t>(body.size()));
  section.put_bytes(body);
}

std::string text_of(SectionType type, std::span<const TextPair> pairs) {
  std::string text;
  append_text_object(text, pairs);
  check_section(type, text.size());
  return text;
}

void put_texts(std::vector<std::byte>& out, SectionType type, std::span<const TextPair> pairs) {
  const std::string text = text_of(type, pairs);
  put_section(out, type, std::as_bytes(std::span(text)));
}

}  // namespace

Sha256 digest_index(std::span<const std::byte> prologue, std::span<const std::byte> entries) {
  Sha256 digest;
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

std::optional<Annex> parse_annex(std::span<const std::byte> slack, uint64_t origin,
                                 const std::function<Sha256()>& index_digest) {
  const auto magic = std::as_bytes(std::span(kAnnexMagic));
  if (slack.size() < magic.size() || !std::ranges::equal(slack.first(magic.size()), magic))
    return std::nullopt;
  ByteCursor cursor(slack, "annex", origin);
  cursor.take(magic.size(), "magic");
  const auto nbytes = cursor.read_le<uint32_t>("length");
  const auto sections = cursor.take(nbytes, "sections");
  const auto covered = slack.first(cursor.position());
  const auto stored = cursor.read_le<uint32_t>("checksum");
  if (crc32(0, covered) != stored)
    cursor.fail("checksum", "its checksum does not fit: it is damaged");
  return SectionReader(sections, origin + magic.size() + sizeof nbytes, false).read(index_digest);
}

Annex parse_sealed(std::span<const std::byte> sections) {
  return SectionReader(sections, 0, true).read({});
}

std::vector<std::byte> serialize_metadata(std::span<const TextPair> metadata) {
  std::vector<std::byte> out;
  put_texts(out, SectionType::metadata, metadata);
  return out;
}

std::vector<std::byte> serialize_annex(const AnnexToWrite& annex, std::span<const std::byte> sealed,
                                       const Sha256& index_digest) {
  std::vector<std::byte> sections;
  if (!annex.metadata.empty() && sealed.empty())
    put_texts(sections, SectionType::metadata, annex.metadata);
  if (!annex.ties.empty()) put_texts(sections, SectionType::ties, annex.ties);
  if (!sealed.empty()) put_section(sections, SectionType::sealed, sealed);
  Sha256 digest = index_digest;
  digest.update(sections);
  put_section(sections, SectionType::index_digest, digest.finish());

  std::vector<std::byte> out;
  out.reserve(sections.size() + kFrameNbytes);
  ByteWriter annex_out(out);
  annex_out.put_bytes(std::as_bytes(std::span(kAnnexMagic)));
  annex_out.put(static_cast<uint32_t>(sections.size()));
  annex_out.put_bytes(sections);
  annex_out.put(crc32(0, out));
  return out;
}

uint64_t annex_nbytes(const AnnexToWrite& annex, uint64_t sealed_overhead) {
  if (annex.metadata.empty() && annex.ties.empty()) return 0;
  uint64_t nbytes = kFrameNbytes + kSectionHeadNbytes + Sha256Digest{}.size();
  const auto add = [&nbytes](SectionType type, std::span<const TextPair> pairs) {
    if (!pairs.empty()) nbytes += kSectionHeadNbytes + text_of(type, pairs).size();
  };
  add(SectionType::metadata, annex.metadata);
  add(SectionType::ties, annex.ties);
  return annex.metadata.empty() ? nbytes : nbytes + sealed_overhead;
}

}  // namespace tensorizer::format
