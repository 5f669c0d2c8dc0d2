// Input: u8 "frame it", then the sections of an annex, or, unframed, what follows the last index
// entry; or a detached signature. What parses serializes to an annex of the same content.
#include "core/error.h"
#include "format/annex.h"
#include "fuzz_check.h"

using namespace tensorizer;
using namespace tensorizer::format;

namespace {

constexpr uint64_t kEntries = 2;

std::vector<std::byte> framed(std::span<const std::byte> sections) {
  constexpr std::string_view kMagic = "TZRANNX1";
  std::vector<std::byte> out(kMagic.size() + 4 + sections.size() + 4);
  std::memcpy(out.data(), kMagic.data(), kMagic.size());
  store_le(&out[8], static_cast<uint32_t>(sections.size()));
  if (!sections.empty()) std::memcpy(&out[12], sections.data(), sections.size());
  store_le(&out[out.size() - 4], digest::crc32(0, std::span(out).first(out.size() - 4)));
  return out;
}

void check(const Annex& annex) {
  AnnexToWrite again;
  if (annex.metadata) again.metadata = *annex.metadata;
  again.ties = annex.ties;
  const bool authenticated = annex.tag || !annex.signatures.empty();
  FUZZ_CHECK(!authenticated || (annex.records.size() == kEntries && annex.digest));
  if (again.metadata.empty() && again.ties.empty() && !authenticated) return;
  if (authenticated) again.records = annex.records;
  const SignaturesToCome to_come{.tag = annex.tag.has_value(),
                                 .derivation = annex.tag && annex.tag->derivation,
                                 .signatures = annex.signatures.size()};
  const std::vector<std::byte> bytes = serialize_annex(
      again, {}, digest::Sha256(),
      [&](const digest::Sha256Digest&) { return Signatures{annex.tag, annex.signatures}; });
  FUZZ_CHECK(bytes.size() == annex_nbytes(again, 0, kEntries, to_come));
  const auto parsed = parse_annex(bytes, 0, kEntries, [] { return digest::Sha256(); });
  FUZZ_CHECK(parsed && parsed->ties == annex.ties && parsed->digest == parsed->computed);
  FUZZ_CHECK(!authenticated || parsed->records == annex.records);
  FUZZ_CHECK(parsed->signatures == annex.signatures);
  FUZZ_CHECK(parsed->tag.has_value() == annex.tag.has_value());
  if (annex.tag)
    FUZZ_CHECK(parsed->tag->tag == annex.tag->tag &&
               parsed->tag->derivation == annex.tag->derivation);
  FUZZ_CHECK(parsed->metadata.value_or(std::vector<TextPair>{}) == again.metadata);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  auto input = tensorizer::testing::fuzz_bytes(data, size);
  const bool frame = (tensorizer::testing::take_integer<uint8_t>(input) & 1) != 0;
  try {
    const std::vector<std::byte> slack =
        frame ? framed(input) : std::vector<std::byte>(input.begin(), input.end());
    const auto annex = parse_annex(slack, 0, kEntries, [] { return digest::Sha256(); });
    FUZZ_CHECK(annex || !frame);
    if (annex) check(*annex);
  } catch (const Error& error) {
    FUZZ_CHECK(error.code() == Errc::malformed || error.code() == Errc::crypto);
    FUZZ_CHECK(std::string_view(error.what()).size() < 1000);
  }
  try {
    const Annex detached = parse_detached(
        frame ? framed(input) : std::vector<std::byte>(input.begin(), input.end()), {});
    FUZZ_CHECK(!detached.signatures.empty() && !detached.records.empty());
    FUZZ_CHECK(!detached.tag && !detached.metadata && detached.ties.empty());
  } catch (const Error& error) {
    FUZZ_CHECK(error.code() == Errc::malformed);
  }
  try {
    const Annex sealed = parse_sealed(input);
    FUZZ_CHECK(sealed.ties.empty() && sealed.sealed.empty() && !sealed.digest);
  } catch (const Error& error) {
    FUZZ_CHECK(error.code() == Errc::malformed);
  }
  return 0;
}
