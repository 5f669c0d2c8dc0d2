// What is kept of record headers: their fields, and the beginning of their digests.
#include "load/loaded_headers.h"

#include <malloc.h>

#include "session_harness.h"

namespace tensorizer::load {
namespace {

using tests::Bytes;

struct Saved {
  std::vector<tests::Tensor> tensors;
  Bytes file;
  std::shared_ptr<const OpenedIndex> opened;

  std::span<std::byte> header(uint32_t i) {
    const format::IndexEntry& entry = opened->index[i];
    return std::span(file).subspan(entry.offset, entry.header_nbytes());
  }
};

Saved saved(const std::vector<size_t>& sizes) {
  Saved made;
  made.tensors = tests::make_tensors(sizes, 4);
  made.file = tests::save_all(made.tensors);
  tests::PlainSource source(made.file);
  made.opened = tests::open_all(source);
  return made;
}

void keep_all(LoadedHeaders& headers, Saved& from) {
  for (uint32_t i = 0; i < headers.size(); ++i) {
    const auto bytes = from.header(i);
    const auto header = format::parse_record_header(bytes, from.opened->index[i], false);
    headers.keep(i, header, format::digest_header(bytes, header, {}));
    std::fill(bytes.begin(), bytes.end(), std::byte{0xEE});  // nothing borrows from them
  }
}

TEST(LoadedHeaders, GiveTheFieldsAndCompareHashesWithoutTheBytesTheyCameFrom) {
  Saved file = saved({5, 300'000, 0});
  LoadedHeaders headers(file.opened, {0, 1, 2});
  keep_all(headers, file);
  for (uint32_t i = 0; i < 3; ++i) {
    const format::RecordHeader header = headers.header(i);
    EXPECT_EQ(header.name, file.tensors[i].name);
    EXPECT_EQ(header.dtype, "|u1");
    EXPECT_EQ(header.shape, std::vector<uint64_t>{file.tensors[i].data.size()});
    EXPECT_EQ(header.hashes.size(), 2U);
    EXPECT_TRUE(headers.matches(i, file.tensors[i].data));
    Bytes other = file.tensors[i].data;
    if (other.empty()) continue;
    other.back() ^= std::byte{1};
    EXPECT_FALSE(headers.matches(i, other));
  }
  EXPECT_THROW(headers.header(3), std::out_of_range);
}

TEST(LoadedHeaders, PaddingThatIsNotZeroCountsToo) {
  Saved file = saved({300'000});
  const auto bytes = file.header(0);
  format::RecordHeader header = format::parse_record_header(bytes, file.opened->index[0], false);
  ASSERT_GT(bytes.size(), header.crypt_end + 100);
  bytes[header.crypt_end + 50] = std::byte{7};
  digest::HeaderDigest digest = format::digest_header(bytes, header, {});
  digest.sha256.update(file.tensors[0].data);
  const digest::Sha256Digest sha256 = digest.sha256.finish();
  const uint32_t crc32 = digest::crc32(digest.crc32, file.tensors[0].data);
  for (const format::StoredHash& hash : header.hashes) {
    const void* from =
        hash.type == format::HashType::crc32 ? static_cast<const void*>(&crc32) : sha256.data();
    std::memcpy(const_cast<std::byte*>(hash.value.data()), from, hash.value.size());
  }
  LoadedHeaders headers(file.opened, {0});
  keep_all(headers, file);
  EXPECT_TRUE(headers.matches(0, file.tensors[0].data));
}

TEST(LoadedHeaders, OfPaddedRecordsTakeWhatTheirFieldsTake) {
  Saved file = saved({300'000});
  const Bytes bytes(file.header(0).begin(), file.header(0).end());
  ASSERT_GT(bytes.size(), 2000U);
  const format::RecordHeader header =
      format::parse_record_header(bytes, file.opened->index[0], false);
  constexpr size_t kRecords = 2000;
  const auto in_use = [] { return mallinfo2().uordblks + mallinfo2().hblkhd; };
  const size_t before = in_use();
  LoadedHeaders headers(file.opened, std::vector<uint32_t>(kRecords, 0));
  const digest::HeaderDigest digest = format::digest_header(bytes, header, {});
  for (size_t i = 0; i < kRecords; ++i) headers.keep(i, header, digest);
  EXPECT_LT(in_use() - before, kRecords * 300);
}

}  // namespace
}  // namespace tensorizer::load
