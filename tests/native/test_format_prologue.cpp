#include "bytes.h"
#include "format/prologue.h"

namespace tensorizer::format {
namespace {

using testing::Build;
using testing::Bytes;
using testing::expect_error;
using testing::to_hex;

Bytes make(uint32_t version, uint32_t flags, uint64_t count = 1, uint64_t metadata = 100) {
  return Build()
      .text("|TZR|")
      .le(version)
      .le(flags)
      .zeros(28)
      .le(uint64_t{8})
      .zeros(8)
      .le(count)
      .le(metadata);
}

TEST(Prologue, FieldsComeBackAndSerializeToTheSameBytes) {
  const Bytes bytes = make(5, 3, 7, 4096);
  ASSERT_EQ(bytes.size(), kPrologueNbytes);
  const Prologue prologue = parse_prologue(bytes, 0, KeyGiven::yes);
  EXPECT_EQ(prologue.version, 5u);
  EXPECT_EQ(prologue.flags, 3u);
  EXPECT_EQ(prologue.tensor_size, 8u);
  EXPECT_EQ(prologue.tensor_count, 7u);
  EXPECT_EQ(prologue.metadata_nbytes, 4096u);
  EXPECT_EQ(to_hex(serialize_prologue(prologue)), to_hex(bytes));
}

TEST(Prologue, TheReservedFieldMayHoldAnything) {
  Bytes bytes = make(1, 0);
  for (size_t i = 49; i < 57; ++i) bytes[i] = std::byte{0xAB};
  EXPECT_EQ(parse_prologue(bytes, 0, KeyGiven::no).tensor_count, 1u);
}

struct Case {
  uint32_t version, flags;
  bool encrypted, tagged;
};

TEST(Prologue, VersionAndFlagsDecideAboutEncryptionAndTags) {
  for (const Case c : std::vector<Case>{{1, 0, false, false},
                                        {1, 1, false, false},  // a flag before flags had a meaning
                                        {2, 1, false, false},
                                        {3, 0, true, false},
                                        {3, 1, true, false},
                                        {4, 0, false, false},
                                        {4, 1, true, false},
                                        {5, 0, false, false},
                                        {5, 1, true, false},
                                        {5, 2, false, true},
                                        {5, 3, true, true}}) {
    SCOPED_TRACE(std::to_string(c.version) + "/" + std::to_string(c.flags));
    const Bytes bytes = make(c.version, c.flags);
    const KeyGiven right = c.encrypted ? KeyGiven::yes : KeyGiven::no;
    const KeyGiven wrong = c.encrypted ? KeyGiven::no : KeyGiven::yes;
    const Prologue prologue = parse_prologue(bytes, 0, right);
    EXPECT_EQ(prologue.has_crypt_info(), c.encrypted);
    EXPECT_EQ(prologue.tagged_entries(), c.tagged);
    expect_error(Errc::crypto, [&] { parse_prologue(bytes, 0, wrong); });
  }
}

TEST(Prologue, UnknownVersionsAreUnsupportedWithAndWithoutAKey) {
  for (const uint32_t version : {0u, 6u, 7u, 0xFFFFFFFFu}) {
    for (const KeyGiven key : {KeyGiven::no, KeyGiven::yes}) {
      const auto text =
          expect_error(Errc::unsupported, [&] { parse_prologue(make(version, 4), 0, key); });
      EXPECT_NE(text.find(std::to_string(version)), std::string::npos) << text;
    }
  }
}

TEST(Prologue, FlagsBeyondTheKnownTwoAreMalformedInEveryVersion) {
  for (uint32_t version = 1; version <= 5; ++version) {
    for (const uint32_t flags : {4u, 5u, 128u, 256u, 0x80000000u}) {
      expect_error(Errc::malformed, [&] { parse_prologue(make(version, flags), 0, KeyGiven::no); });
    }
    Bytes high = make(version, 0);
    high[40] = std::byte{0x80};
    expect_error(Errc::malformed, [&] { parse_prologue(high, 0, KeyGiven::no); });
  }
}

TEST(Prologue, ErrorsComeInTheOrderOfTheChecks) {
  // magic, version, length, unknown flags, encryption, tags against the version
  Bytes bytes = make(6, 4);
  bytes[0] = std::byte{0};
  expect_error(Errc::malformed, [&] { parse_prologue(bytes, 0, KeyGiven::yes); });
  const Bytes unknown = make(6, 4);
  expect_error(Errc::unsupported,
               [&] { parse_prologue(std::span(unknown).first(20), 0, KeyGiven::yes); });
  const Bytes flagged = make(4, 7);
  expect_error(Errc::truncated,
               [&] { parse_prologue(std::span(flagged).first(72), 0, KeyGiven::no); });
  expect_error(Errc::malformed, [&] { parse_prologue(flagged, 0, KeyGiven::no); });
  // Encrypted and wrongly tagged: without a key the key is the first thing to miss.
  expect_error(Errc::crypto, [&] { parse_prologue(make(4, 3), 0, KeyGiven::no); });
  expect_error(Errc::malformed, [&] { parse_prologue(make(4, 3), 0, KeyGiven::yes); });
  expect_error(Errc::malformed, [&] { parse_prologue(make(4, 2), 0, KeyGiven::no); });
}

TEST(Prologue, EveryPrefixIsRefusedAndSaysWhere) {
  const Bytes bytes = make(1, 0);
  for (size_t n = 0; n < bytes.size(); ++n) {
    const auto prefix = std::span(bytes).first(n);
    expect_error(n < 5 ? Errc::malformed : Errc::truncated,
                 [&] { parse_prologue(prefix, 0, KeyGiven::no); });
  }
  const auto text = expect_error(
      Errc::truncated, [&] { parse_prologue(std::span(bytes).first(60), 1000, KeyGiven::no); });
  EXPECT_NE(text.find("1057"), std::string::npos) << text;
}

}  // namespace
}  // namespace tensorizer::format
