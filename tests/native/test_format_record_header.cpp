#include "bytes.h"
#include "format/record_header.h"
#include "format_reading.h"

namespace tensorizer::format {
namespace {

using testing::Build;
using testing::Bytes;
using testing::expect_error;
using testing::to_hex;
using namespace std::string_view_literals;

const std::vector<uint64_t> kShape = {2};

IndexEntry entry_for(const Bytes& bytes) {
  IndexEntry entry;
  entry.name = "w", entry.dtype = "<f4", entry.shape = kShape;
  entry.offset = 1000, entry.data_offset = 1000 + bytes.size(), entry.data_nbytes = 8;
  entry.itemsize = 4, entry.loaded_nbytes = 8;
  return entry;
}

HeaderToWrite header_to_write() {
  return {7, TensorType::state_dict, "w", "<f4", kShape, false, digest::HashChoice{}, false, {}, 8};
}

HeaderLayout written(const HeaderToWrite& header, uint64_t padding = 0) {
  return serialize_record_header(header, record_header_nbytes(header) + padding);
}

// Parses and compares with an index that says what `header_to_write` says.
RecordHeader parse(const Bytes& bytes, bool has_crypt_info = false) {
  return parse_record_header(bytes, entry_for(bytes), has_crypt_info);
}

std::string refusal(const Bytes& bytes, bool has_crypt_info = false) {
  return expect_error(Errc::malformed, [&] { parse(bytes, has_crypt_info); });
}

TEST(RecordHeader, WhatIsWrittenReadsBack) {
  for (const uint64_t padding : {0u, 1u, 4000u}) {
    const HeaderLayout layout = written(header_to_write(), padding);
    EXPECT_EQ(layout.bytes.size(), 66 + 1 + 3 + 4 + padding);
    const RecordHeader header = parse(layout.bytes);
    EXPECT_EQ(header.module_idx, 7);
    EXPECT_EQ(header.type, TensorType::state_dict);
    EXPECT_EQ(header.name, "w");
    EXPECT_EQ(header.dtype, "<f4");
    EXPECT_EQ(header.shape, kShape);
    EXPECT_EQ(header.data_nbytes, 8u);
    ASSERT_EQ(header.hashes.size(), 2u);
    EXPECT_EQ(header.hashes[0].type, HashType::crc32);
    EXPECT_EQ(header.hashes[0].value.data(), layout.bytes.data() + layout.crc32_at);
    EXPECT_EQ(header.hashes[1].type, HashType::sha256);
    EXPECT_EQ(header.hashes[1].value.data(), layout.bytes.data() + layout.sha256_at);
    EXPECT_EQ(header.crypt_begin, header.crypt_end);
    EXPECT_FALSE(header.crypt);
    EXPECT_NO_THROW(check_against_index(header, entry_for(layout.bytes)));
  }
}

TEST(RecordHeader, EveryChoiceOfHashesIsWrittenAndRead) {
  for (const bool crc : {false, true}) {
    for (const bool sha : {false, true}) {
      HeaderToWrite to_write = header_to_write();
      to_write.hashes = {crc, sha};
      const HeaderLayout layout = written(to_write);
      EXPECT_EQ(parse(layout.bytes).hashes.size(), size_t{crc} + size_t{sha});
      EXPECT_EQ(layout.crc32_at != 0, crc);
      EXPECT_EQ(layout.sha256_at != 0, sha);
    }
  }
}

TEST(RecordHeader, WideDimensionsAreReadWhereTheIndexSaysSo) {
  const std::vector<uint64_t> shape = {uint64_t{1} << 32, 0};
  HeaderToWrite to_write = header_to_write();
  to_write.shape = shape, to_write.wide_dims = true, to_write.data_nbytes = 0;
  const HeaderLayout layout = written(to_write);
  IndexEntry entry = entry_for(layout.bytes);
  entry.entry_version = 5, entry.shape = shape, entry.data_nbytes = 0, entry.loaded_nbytes = 0;
  EXPECT_EQ(parse_record_header(layout.bytes, entry, false).shape, shape);
  entry.entry_version = 1;
  EXPECT_THROW(parse_record_header(layout.bytes, entry, false), Error);
}

TEST(RecordHeader, EveryCutIsMalformed) {
  const Bytes whole = written(header_to_write()).bytes;
  for (size_t n = 0; n < whole.size(); ++n)
    refusal(Bytes(whole.begin(), whole.begin() + static_cast<long>(n)));
}

TEST(RecordHeader, ItsSizeIsTheSizeTheIndexLeaves) {
  Bytes bytes = written(header_to_write()).bytes;
  bytes[0] = static_cast<std::byte>(bytes.size() + 1);
  EXPECT_NE(refusal(bytes).find("75"), std::string::npos);
  bytes[0] = std::byte{0};
  refusal(bytes);
}

TEST(RecordHeader, FieldsMayNotReachIntoTheDataLength) {
  // With a hash block one byte longer it would take the first byte of the data length.
  HeaderToWrite to_write = header_to_write();
  to_write.hashes = {false, false};
  Bytes bytes = written(to_write).bytes;
  const size_t block_at = bytes.size() - 8 - 3;
  store_le(&bytes[block_at], uint16_t{2});
  refusal(bytes);
}

TEST(RecordHeader, NegativeLengthsAndUnknownTypesAreMalformed) {
  Bytes bytes = written(header_to_write()).bytes;
  store_le(&bytes[bytes.size() - 8], int64_t{-8});
  EXPECT_NE(refusal(bytes).find("negative"), std::string::npos);
  bytes = written(header_to_write()).bytes;
  bytes[10] = std::byte{3};
  EXPECT_NE(refusal(bytes).find("tensor type 3"), std::string::npos);
}

TEST(RecordHeader, HashesComeInAnyNumberAndOrderWithSpareBytesBehind) {
  const auto with_block = [](const Bytes& block) {
    Build out;
    out.le(uint64_t{8 + 2 + 1 + 3 + 4 + 5 + 2 + block.size() + 8}).le(uint16_t{0}).le(uint8_t{2});
    out.le(uint16_t{1}).text("w").le(uint8_t{3}).text("<f4").le(uint8_t{1}).le(uint32_t{2});
    return Bytes(out.le(static_cast<uint16_t>(block.size())).raw(block).le(int64_t{8}));
  };
  const Bytes three = with_block(Build()
                                     .le(uint8_t{3})
                                     .le(uint8_t{1})
                                     .le(uint8_t{2})
                                     .zeros(2)
                                     .le(uint8_t{0})
                                     .le(uint8_t{4})
                                     .zeros(4)
                                     .le(uint8_t{1})
                                     .le(uint8_t{0})
                                     .zeros(9));
  const RecordHeader header = parse(three);
  ASSERT_EQ(header.hashes.size(), 3u);
  EXPECT_EQ(header.hashes[0].value.size(), 2u);
  EXPECT_EQ(header.hashes[1].type, HashType::crc32);
  EXPECT_EQ(header.hashes[2].value.size(), 0u);
  EXPECT_EQ(parse(with_block(Build().le(uint8_t{0}))).hashes.size(), 0u);
  EXPECT_NE(
      refusal(with_block(Build().le(uint8_t{1}).le(uint8_t{2}).le(uint8_t{0}))).find("hash type 2"),
      std::string::npos);
  refusal(with_block({}));
  refusal(with_block(Build().le(uint8_t{1})));
  refusal(with_block(Build().le(uint8_t{1}).le(uint8_t{0}).le(uint8_t{5}).zeros(4)));
  refusal(with_block(Build().le(uint8_t{255}).zeros(20)));
}

TEST(RecordHeader, StructuredNamesBelongToStateDicts) {
  const auto named = [](std::string_view name, TensorType type) {
    HeaderToWrite to_write = header_to_write();
    to_write.name = name, to_write.type = type;
    const HeaderLayout layout = written(to_write);
    IndexEntry entry = entry_for(layout.bytes);
    entry.name = name;
    return parse_record_header(layout.bytes, entry, false).type;
  };
  EXPECT_EQ(named("\x1e[\"a\",0]", TensorType::state_dict), TensorType::state_dict);
  EXPECT_EQ(named("\x1e[\"a\"]", TensorType::parameter), TensorType::parameter);
  expect_error(Errc::malformed, [&] { named("\x1e[\"a\",0]", TensorType::parameter); });
  expect_error(Errc::malformed, [&] { named("\x1e[0]", TensorType::buffer); });
}

// --- against the index ---

struct Pair {
  Bytes bytes;
  IndexEntry entry;
};

template <class Change>
void compare(Change change) {
  HeaderToWrite to_write = header_to_write();
  IndexEntry entry;
  entry.name = "w", entry.dtype = "<f4", entry.shape = kShape, entry.offset = 1000,
  entry.data_nbytes = 8;
  entry.itemsize = 4, entry.loaded_nbytes = 8;
  change(to_write, entry);
  const HeaderLayout layout = written(to_write);
  entry.data_offset = entry.offset + layout.bytes.size();
  check_against_index(parse_record_header(layout.bytes, entry, false), entry);
}

const std::vector<uint64_t> kScalar, kOne = {1}, kThree = {3}, kTwoOne = {2, 1};

TEST(IndexAndHeader, SpellingsMayDiffer) {
  compare([](auto&, auto&) {});
  compare([](auto& header, auto&) { header.name = "\x1e[\"w\"]"; });
  compare([](auto&, auto& entry) { entry.name = "\x1e[ \"w\" ]"; });
  compare([](auto&, auto& entry) { entry.type = TensorType::parameter; });
  compare(
      [](auto& header, auto& entry) { header.dtype = "<u4", entry.dtype = "<V4\0torch.uint32"sv; });
}

TEST(IndexAndHeader, MeaningsMayNot) {
  const auto refused = [](const char* part, auto change) {
    const auto text = expect_error(Errc::malformed, [&] { compare(change); });
    EXPECT_NE(text.find(part), std::string::npos) << text;
    EXPECT_NE(text.find("'w'"), std::string::npos) << text;
  };
  refused("named 'v'", [](auto& header, auto&) { header.name = "v"; });
  refused("'<i4'", [](auto& header, auto&) { header.dtype = "<i4"; });
  refused("'<f8'", [](auto& header, auto&) { header.dtype = "<f8"; });
  refused("(3), the index says (2)", [](auto& header, auto&) { header.shape = kThree; });
  refused("(2, 1)", [](auto& header, auto&) { header.shape = kTwoOne; });
  refused("length of 12", [](auto& header, auto&) { header.data_nbytes = 12; });
  refused("length of 0", [](auto& header, auto&) { header.data_nbytes = 0; });
}

TEST(IndexAndHeader, TensorsWithoutDataHaveTwoLiberties) {
  const auto bare = [](auto& header, auto& entry) {
    header.dtype = "<V4\0torch.complex32"sv, entry.dtype = "<V4";
    header.data_nbytes = entry.data_nbytes = 0;
  };
  compare(bare);
  expect_error(Errc::malformed, [&] {
    compare([&](auto& header, auto& entry) { bare(header, entry), entry.dtype = "<V2"; });
  });
  expect_error(Errc::malformed, [&] {  // the header must say what the type is
    compare([&](auto& header, auto& entry) { bare(header, entry), header.dtype = "<V4"; });
  });
  expect_error(Errc::malformed, [&] {
    compare([&](auto& header, auto& entry) { bare(header, entry), header.dtype = "<f4"; });
  });
  compare([](auto& header, auto& entry) {
    header.shape = kScalar, entry.shape = kOne, header.data_nbytes = entry.data_nbytes = 0;
  });
  expect_error(Errc::malformed, [&] {
    compare([](auto& header, auto& entry) {
      header.shape = kScalar, entry.shape = kOne, header.data_nbytes = entry.data_nbytes = 4;
    });
  });
  expect_error(Errc::malformed, [&] {
    compare([](auto& header, auto& entry) {
      header.shape = kOne, entry.shape = kScalar, header.data_nbytes = entry.data_nbytes = 0;
    });
  });
}

// --- crypt_info and digests ---

TEST(RecordHeader, CryptInfoIsThereExactlyWhereTheFileHasIt) {
  const Bytes block = serialize_crypt_info(std::nullopt, Nonce{}, 3);
  HeaderToWrite to_write = header_to_write();
  to_write.hashes = {false, true};
  to_write.has_crypt_info = true, to_write.crypt_info = block;
  const HeaderLayout layout = written(to_write, 11);
  EXPECT_EQ(layout.bytes.size(), 120 + 1 + 3 + 4 + 16 * 3 + 11u);
  const RecordHeader header = parse(layout.bytes, true);
  ASSERT_TRUE(header.crypt);
  EXPECT_EQ(header.crypt->cipher->macs.data(), layout.bytes.data() + layout.macs_at);
  EXPECT_EQ(header.crypt_begin, layout.crypt_begin);
  EXPECT_EQ(header.crypt_end, layout.crypt_end);
  EXPECT_EQ(header.crypt_end - header.crypt_begin, block.size());
  // Without it, what follows the hashes is padding.
  EXPECT_FALSE(parse(layout.bytes, false).crypt);
  // And padding is no crypt_info.
  const HeaderLayout plain = written(header_to_write());
  refusal(plain.bytes, true);
  to_write.crypt_info = {};
  expect_error(Errc::invalid_argument, [&] { written(to_write); });
}

TEST(RecordHeader, AnEmptyCryptInfoHasNoMacs) {
  const Bytes block = serialize_empty_crypt_info();
  HeaderToWrite to_write = header_to_write();
  to_write.has_crypt_info = true, to_write.crypt_info = block;
  const HeaderLayout layout = written(to_write);
  EXPECT_EQ(layout.macs_at, 0u);
  EXPECT_FALSE(parse(layout.bytes, true).crypt->cipher);
}

TEST(RecordHeader, ACryptInfoThatOverrunsTheHeaderIsMalformed) {
  const Bytes block = serialize_crypt_info(std::nullopt, Nonce{}, 1);
  HeaderToWrite to_write = header_to_write();
  to_write.has_crypt_info = true, to_write.crypt_info = block;
  HeaderLayout layout = written(to_write);
  for (const uint64_t nbytes : {uint64_t{block.size() - 7}, uint64_t{1} << 40, ~uint64_t{0}}) {
    store_le(&layout.bytes[layout.crypt_begin], nbytes);
    refusal(layout.bytes, true);
  }
}

// The digests of writer and reader, and what they cover.
TEST(HeaderDigest, OfAFilledInHeaderIsThatOfTheEmptyOne) {
  const Bytes block = serialize_crypt_info(std::nullopt, Nonce{}, 2);
  for (const bool crypt : {false, true}) {
    HeaderToWrite to_write = header_to_write();
    to_write.has_crypt_info = crypt;
    if (crypt) to_write.crypt_info = block;
    HeaderLayout layout = written(to_write, 20);
    digest::HeaderDigest before = digest_header(layout, to_write.hashes);
    std::fill_n(layout.bytes.begin() + static_cast<long>(layout.crc32_at), 4, std::byte{0x11});
    std::fill_n(layout.bytes.begin() + static_cast<long>(layout.sha256_at), 32, std::byte{0x22});
    if (crypt) layout.bytes[layout.macs_at] = std::byte{0x33};
    digest::HeaderDigest after = digest_header(layout.bytes, parse(layout.bytes, crypt), {});
    EXPECT_EQ(after.crc32, before.crc32);
    EXPECT_EQ(to_hex(after.sha256.finish()), to_hex(before.sha256.finish()));
  }
}

TEST(HeaderDigest, CoversEveryByteButHashValuesAndCryptInfo) {
  const Bytes block = serialize_crypt_info(std::nullopt, Nonce{}, 1);
  HeaderToWrite to_write = header_to_write();
  to_write.has_crypt_info = true, to_write.crypt_info = block;
  const HeaderLayout layout = written(to_write, 5);
  const RecordHeader header = parse(layout.bytes, true);
  const uint32_t original = digest_header(layout.bytes, header, {.sha256 = false}).crc32;
  for (size_t i = 0; i < layout.bytes.size(); ++i) {
    Bytes turned = layout.bytes;
    turned[i] ^= std::byte{1};
    RecordHeader same_places = header;  // as if the turned byte had parsed the same way
    for (StoredHash& hash : same_places.hashes) {
      hash.value = std::span(turned).subspan(
          static_cast<size_t>(hash.value.data() - layout.bytes.data()), hash.value.size());
    }
    const bool left_out = (i >= layout.crypt_begin && i < layout.crypt_end) ||
                          (i >= layout.crc32_at && i < layout.crc32_at + 4) ||
                          (i >= layout.sha256_at && i < layout.sha256_at + 32);
    EXPECT_EQ(digest_header(turned, same_places, {.sha256 = false}).crc32 == original, left_out)
        << i;
  }
}

TEST(CheckHashes, EveryStoredValueMustFit) {
  const uint32_t crc = 0x12345678;
  const digest::Sha256Digest sha = digest::Sha256().finish();
  const Bytes right_crc = Build().le(crc), wrong_crc = Build().le(uint32_t{crc + 1});
  const Bytes long_crc = Build().le(crc).zeros(1);
  Bytes wrong_sha(sha.begin(), sha.end());
  wrong_sha[31] ^= std::byte{1};
  RecordHeader header;
  header.name = "w";
  EXPECT_NO_THROW(check_hashes(header, nullptr, nullptr));
  header.hashes = {
      {HashType::crc32, right_crc}, {HashType::sha256, sha}, {HashType::crc32, right_crc}};
  EXPECT_NO_THROW(check_hashes(header, &crc, &sha));
  const auto refused = [&](StoredHash hash) {
    header.hashes = {{HashType::crc32, right_crc}, hash};
    return expect_error(Errc::hash_mismatch, [&] { check_hashes(header, &crc, &sha); });
  };
  EXPECT_NE(refused({HashType::crc32, wrong_crc}).find("stored 79563412, computed 78563412"),
            std::string::npos);
  EXPECT_NE(refused({HashType::sha256, wrong_sha}).find("tensor 'w': SHA-256"), std::string::npos);
  refused({HashType::crc32, long_crc});
  refused({HashType::crc32, {}});
  refused({HashType::sha256, std::span(wrong_sha).first(31)});
  header.hashes = {{HashType::sha256, sha}};
  expect_error(Errc::hash_mismatch, [&] { check_hashes(header, &crc, nullptr); });
}

TEST(RecordHeaderToWrite, FieldsThatDoNotFitAreTheCallersMistake) {
  const auto refused = [](auto change) {
    HeaderToWrite to_write = header_to_write();
    change(to_write);
    expect_error(Errc::out_of_range, [&] { written(to_write); });
  };
  const std::string long_name(65536, 'n'), long_dtype(256, 'd');
  const std::vector<uint64_t> high(256, 1), is_long = {uint64_t{1} << 32};
  refused([&](auto& header) { header.name = long_name; });
  refused([&](auto& header) { header.dtype = long_dtype; });
  refused([&](auto& header) { header.shape = high; });
  refused([&](auto& header) { header.shape = is_long; });
  refused([&](auto& header) { header.data_nbytes = uint64_t{1} << 63; });
  HeaderToWrite to_write = header_to_write();
  expect_error(Errc::invalid_argument,
               [&] { serialize_record_header(to_write, record_header_nbytes(to_write) - 1); });
}

}  // namespace
}  // namespace tensorizer::format
