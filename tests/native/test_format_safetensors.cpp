// Safetensors headers: the worked example, the order and spelling of canonical files, refusals.
#include <gtest/gtest.h>

#include <array>
#include <cstring>

#include "core/endian.h"
#include "core/error.h"
#include "format/dtype.h"
#include "format/safetensors.h"

namespace tensorizer::format {
namespace {

std::vector<std::byte> bytes_of(std::string_view text) {
  std::vector<std::byte> bytes(text.size());
  std::memcpy(bytes.data(), text.data(), text.size());
  return bytes;
}

std::string_view text_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

Errc code_of(const auto& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.code();
  }
  return Errc::cancelled;
}

TEST(FormatSafetensors, TheWorkedExampleIsWrittenToTheByte) {
  const uint64_t shape[] = {2};
  const SafetensorsTensor w{"w", "<f4", shape, 8};
  const auto bytes = serialize_safetensors({&w, 1}, std::nullopt);
  ASSERT_EQ(bytes.size(), 64u);
  EXPECT_EQ(load_le<uint64_t>(bytes.data()), 0x38u);
  EXPECT_EQ(text_of(bytes).substr(8),
            "{\"w\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}  ");
  const SafetensorsHeader header = parse_safetensors({bytes.begin() + 8, bytes.end()}, 0, 72);
  EXPECT_EQ(header.index[0].data_offset, 64u);
  EXPECT_EQ(header.index[0].header_nbytes(), 0u);
}

TEST(FormatSafetensors, MetadataComesFirstAndTextIsEscapedAsTheReferenceDoes) {
  const std::vector<TextPair> pairs = {{"b", "\"\\\b\t\n\f\r\x01\x7f\xc3\xa9"}, {"a", ""}};
  const auto bytes = serialize_safetensors({}, Metadata(pairs));
  EXPECT_TRUE(text_of(bytes).substr(8).starts_with(
      "{\"__metadata__\":{\"b\":\"\\\"\\\\\\b\\t\\n\\f\\r\\u0001\x7f\xc3\xa9\",\"a\":\"\"}}"));
  EXPECT_EQ(*parse_safetensors({bytes.begin() + 8, bytes.end()}, 0, bytes.size()).metadata, pairs);
}

TEST(FormatSafetensors, CanonicalOrderIsByTypeAndThenByNameInByteOrder) {
  const uint64_t shape[] = {8};
  std::vector<SafetensorsTensor> tensors;
  const auto types = safetensors_dtypes();
  for (size_t i = types.size(); i-- > 0;) {
    for (const char* name : {"b", "B", "\xc3\xa9"})
      tensors.push_back({name, types[i].name, shape, types[i].bits});
  }
  const auto order = canonical_order(tensors);
  for (size_t i = 0; i < order.size(); ++i) {
    EXPECT_EQ(tensors[order[i]].dtype, types[i / 3].name);
    EXPECT_EQ(tensors[order[i]].name, (std::array{"B", "b", "\xc3\xa9"}[i % 3]));
  }
}

TEST(FormatSafetensors, PackedTypesCountBytesInTensorsAndElementsInTheFile) {
  const uint64_t shape[] = {2, 4};
  const auto* dtype = find_safetensors_dtype("F4");
  const SafetensorsTensor packed{"p", dtype->stored, shape, 8};
  const auto bytes = serialize_safetensors({&packed, 1}, std::nullopt);
  EXPECT_NE(text_of(bytes).find("\"shape\":[2,8]"), std::string_view::npos);
  const auto header = parse_safetensors({bytes.begin() + 8, bytes.end()}, 0, bytes.size() + 8);
  EXPECT_TRUE(std::ranges::equal(header.index[0].shape, shape));
  EXPECT_EQ(header.index[0].dtype, dtype->stored);
}

TEST(FormatSafetensors, OtherSpellingsOfATypeAreThatType) {
  using namespace std::string_view_literals;
  EXPECT_EQ(safetensors_dtype_of("<V2\0torch.uint16"sv)->name, "U16");
  EXPECT_EQ(safetensors_dtype_of("=f4")->name, "F32");
  for (const std::string_view none :
       {"<c16"sv, "<V4\0torch.complex32"sv, "|V1\0torch.uint3"sv, ""sv})
    EXPECT_EQ(safetensors_dtype_of(none), nullptr) << none;
}

TEST(FormatSafetensors, WhatCannotBeWrittenIsRefused) {
  const uint64_t shape[] = {2};
  const auto refused = [&](std::vector<SafetensorsTensor> tensors) {
    return code_of([&] { serialize_safetensors(tensors, std::nullopt); }) == Errc::invalid_argument;
  };
  EXPECT_TRUE(refused({{"__metadata__", "|u1", shape, 2}}));
  EXPECT_TRUE(refused({{"\xff", "|u1", shape, 2}}));
  EXPECT_TRUE(refused({{"a", "<c16", shape, 32}}));
  EXPECT_TRUE(refused({{"a", "|u1", shape, 3}}));
  EXPECT_TRUE(refused({{"a", "|u1", shape, 2}, {"a", "|u1", shape, 2}}));
}

TEST(FormatSafetensors, TheContainerIsToldByItsFirstBytes) {
  const auto detected = [](std::string_view text) { return detect_container(bytes_of(text), 0); };
  using namespace std::string_view_literals;
  EXPECT_EQ(detected("|TZR|\1\0\0\0"sv), Container::tensors);
  EXPECT_EQ(detected("\2\0\0\0\0\0\0\0{}"sv), Container::safetensors);
  EXPECT_EQ(detected("\3\0\0\0\0\0\0\0 {}"sv), Container::safetensors);
  EXPECT_EQ(detected("\xff\xff\xff\xff\xff\xff\xff\xff{"sv), Container::safetensors);
  EXPECT_EQ(detected("PK\3\4 some archive"sv),
            Container::tensors);  // whose parser says what is wrong
  EXPECT_EQ(code_of([&] { detected("1234567"); }), Errc::truncated);
  EXPECT_EQ(detected("version https://git-lfs.github.com/spec/v1\noid x\n"), Container::tensors);
}

TEST(FormatSafetensors, LengthsAreComparedWithTheSourceBeforeAnythingIsSized) {
  EXPECT_EQ(code_of([] { check_safetensors_length(uint64_t{1} << 63, 0, UINT64_MAX); }),
            Errc::malformed);
  EXPECT_EQ(code_of([] { check_safetensors_length(100, 0, 107); }), Errc::truncated);
  EXPECT_EQ(code_of([] { check_safetensors_length(100, 1, 108); }), Errc::truncated);
  EXPECT_NO_THROW(check_safetensors_length(100, 0, 108));
}

}  // namespace
}  // namespace tensorizer::format
