// Every golden file through csrc/format: prologue, index, record headers, stored digests of
// plain payloads.
#include <gtest/gtest.h>

#include <map>

#include "core/checked_math.h"
#include "format/dtype.h"
#include "format_reading.h"
#include "golden_files.h"

namespace tensorizer {
namespace {

using namespace tensorizer::format;
using testing::read_file;
using testing::read_golden;

class Golden : public ::testing::Test {
 protected:
  void SetUp() override {
    names_ = testing::golden_names();
    ASSERT_GT(names_.size(), 200u) << "golden files missing in " << testing::golden_folder();
  }
  std::vector<std::string> names_;
};

// What csrc/format says about the files that must be refused. The rest of them are refused
// later: with a wrong key, by torch, or by verification.
const std::map<std::string, Errc> kRefused = {
    {"r-magic", Errc::malformed},
    {"r-version-0", Errc::unsupported},
    {"r-version-6", Errc::unsupported},
    {"r-version-4294967295", Errc::unsupported},
    {"r-flags-4-v1", Errc::malformed},
    {"r-flags-4-v4", Errc::malformed},
    {"r-flags-4-v5", Errc::malformed},
    {"r-flags-high-v1", Errc::malformed},
    {"r-flags-high-v4", Errc::malformed},
    {"r-flags-high-v5", Errc::malformed},
    {"r-flags-2-v1", Errc::malformed},
    {"r-flags-2-v2", Errc::malformed},
    {"r-flags-2-v4", Errc::malformed},
    {"r-v5-tag-0", Errc::malformed},
    {"r-v5-tag-2", Errc::malformed},
    {"r-v5-tag-3", Errc::malformed},
    {"r-v5-tag-4", Errc::malformed},
    {"r-v5-tag-6", Errc::malformed},
    {"r-v5-untagged", Errc::malformed},
    {"r-v5-flag-lost", Errc::malformed},
    {"r-short-prologue", Errc::truncated},
    {"r-short-version", Errc::truncated},
    {"r-short-index", Errc::truncated},
    {"r-zero-tensors", Errc::malformed},
    {"r-count-high", Errc::malformed},
    {"r-duplicate", Errc::malformed},
    {"r-leaf-and-branch", Errc::malformed},
    {"r-mixed-layer", Errc::malformed},
    {"r-name-empty", Errc::malformed},
    {"r-name-not-json", Errc::malformed},
    {"r-name-object", Errc::malformed},
    {"r-name-fraction", Errc::malformed},
    {"r-name-negative", Errc::malformed},
    {"r-name-null", Errc::malformed},
    {"r-name-none", Errc::malformed},
    {"r-name-nested", Errc::malformed},
    {"r-name-newline", Errc::malformed},
    {"r-name-control", Errc::malformed},
    {"r-name-utf8", Errc::malformed},
    {"r-name-nan", Errc::malformed},
    {"r-name-open", Errc::malformed},
    {"r-name-structured-parameter", Errc::malformed},
    {"r-type", Errc::malformed},
    {"r-dtype-two-separators", Errc::malformed},
    {"r-dtype-void", Errc::malformed},
    {"r-dtype-no-prefix", Errc::malformed},
    {"r-payload-small", Errc::malformed},
    {"r-length-disagrees", Errc::malformed},
    {"r-length-negative", Errc::malformed},
    {"r-hash-type", Errc::malformed},
    {"r-truncated-payload", Errc::truncated},
    {"r-truncated-header", Errc::truncated},
    {"r-truncated-records", Errc::truncated},
    {"r-unencrypted-record", Errc::crypto},
    {"r-two-cipher-chunks", Errc::crypto},
    {"r-chunk-size-0", Errc::malformed},
    {"r-chunk-size-63", Errc::malformed},
    {"r-chunk-size-960", Errc::malformed},
    {"r-chunk-size-1030", Errc::malformed},
    {"r-mac-count", Errc::malformed},
    {"r-chunk-type", Errc::malformed},
    {"v1-name-empty", Errc::malformed},
    {"v1-name-separator", Errc::malformed},
};

// Refused for the format's reason only once keys, torch or payloads come into play.
const std::vector<std::string> kRefusedLater = {
    "r-dtype-unknown",     "r-dtype-not-dtype", "r-hash-payload",
    "r-hash-header",       "r-no-key",          "r-no-key-v4",
    "r-no-key-v5",         "r-key-for-plain",   "r-key-for-plain-v4",
    "r-key-for-plain-v5",  "r-wrong-key",       "r-ciphertext-bit",
    "r-passphrase-for-key"};

// The name as the main release's own case has it: "from-1.0.0-v1-name-empty" is "v1-name-empty".
std::string base_name(const std::string& name) {
  if (!name.starts_with("from-")) return name;
  return name.substr(name.find('-', 5) + 1);
}

KeyGiven fitting_key(std::span<const std::byte> file, uint64_t start) {
  try {
    parse_prologue(file.subspan(start), start, KeyGiven::no);
  } catch (const Error& error) {
    if (error.code() == Errc::crypto) return KeyGiven::yes;
  }
  return KeyGiven::no;
}

uint64_t start_of(const std::string& name) { return name == "c-start-100" ? 100 : 0; }

TEST_F(Golden, EveryReadableFileParsesAndIndexAndHeadersAgree) {
  size_t read = 0;
  for (const std::string& name : names_) {
    if (kRefused.contains(base_name(name))) continue;
    SCOPED_TRACE(name);
    const auto file = read_golden(name);
    const uint64_t start = start_of(name);
    try {
      const auto parsed = read_file(file, fitting_key(file, start), start);
      EXPECT_EQ(parsed.headers.size(), parsed.prologue.tensor_count);
      ++read;
    } catch (const Error& error) {
      ADD_FAILURE() << error.what();
    }
  }
  EXPECT_GT(read, 150u);
}

TEST_F(Golden, EveryDamagedFileIsRefusedWithTheKindOfErrorItDeserves) {
  for (const std::string& name : names_) {
    const auto wanted = kRefused.find(base_name(name));
    if (wanted == kRefused.end()) {
      EXPECT_TRUE(!name.starts_with("r-") || std::ranges::count(kRefusedLater, name) == 1) << name;
      continue;
    }
    SCOPED_TRACE(name);
    const auto file = read_golden(name);
    try {
      read_file(file, fitting_key(file, 0));
      ADD_FAILURE() << "was accepted";
    } catch (const Error& error) {
      EXPECT_EQ(static_cast<int>(error.code()), static_cast<int>(wanted->second)) << error.what();
    }
  }
}

TEST_F(Golden, AKeyIsWantedByEncryptedFilesAndRefusedByPlainOnes) {
  for (const std::string& name : names_) {
    const bool encrypted = name.starts_with("r-no-key");
    if (!encrypted && !name.starts_with("r-key-for-plain")) continue;
    SCOPED_TRACE(name);
    const auto file = read_golden(name);
    const KeyGiven right = encrypted ? KeyGiven::yes : KeyGiven::no;
    const KeyGiven wrong = encrypted ? KeyGiven::no : KeyGiven::yes;
    EXPECT_NO_THROW(parse_prologue(file, 0, right));
    try {
      parse_prologue(file, 0, wrong);
      ADD_FAILURE() << "was accepted";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Errc::crypto) << error.what();
    }
  }
}

// Digests of a plain record recomputed the way a loader does it.
void verify_record(std::span<const std::byte> file, const IndexEntry& entry,
                   const RecordHeader& header) {
  digest::HeaderDigest digest = digest_header(testing::header_bytes(file, entry), header, {});
  const auto payload = file.subspan(entry.data_offset, entry.data_nbytes);
  const uint32_t crc =
      digest::crc32_combine(digest.crc32, digest::crc32(0, payload), payload.size());
  EXPECT_EQ(crc, digest::crc32(digest.crc32, payload));
  digest.sha256.update(payload);
  const digest::Sha256Digest sha = digest.sha256.finish();
  check_hashes(header, &crc, &sha);
}

TEST_F(Golden, TheStoredDigestsOfPlainFilesFit) {
  size_t verified = 0;
  for (const std::string& name : names_) {
    const std::string base = base_name(name);
    // Meta scalars of upstream carry digests of something else.
    if (kRefused.contains(base) || base.starts_with("r-") || base == "v4-meta-scalar") continue;
    const auto file = read_golden(name);
    const uint64_t start = start_of(name);
    if (fitting_key(file, start) == KeyGiven::yes) continue;
    SCOPED_TRACE(name);
    const auto parsed = read_file(file, KeyGiven::no, start);
    for (size_t i = 0; i < parsed.headers.size(); ++i) {
      const IndexEntry& entry = (*parsed.index)[i];
      if (entry.zero_filled()) continue;
      EXPECT_NO_THROW(verify_record(file, entry, parsed.headers[i])) << std::string(entry.name);
      ++verified;
    }
  }
  EXPECT_GT(verified, 500u);
}

TEST_F(Golden, ATurnedPayloadBitOrHeaderBitIsAHashMismatch) {
  for (const char* name : {"r-hash-payload", "r-hash-header"}) {
    SCOPED_TRACE(name);
    const auto file = read_golden(name);
    const auto parsed = read_file(file, KeyGiven::no);
    size_t mismatches = 0;
    for (size_t i = 0; i < parsed.headers.size(); ++i) {
      try {
        verify_record(file, (*parsed.index)[i], parsed.headers[i]);
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), Errc::hash_mismatch);
        ++mismatches;
      }
    }
    EXPECT_EQ(mismatches, 1u);
  }
}

}  // namespace
}  // namespace tensorizer
