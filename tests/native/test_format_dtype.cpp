#include "bytes.h"
#include "format/dtype.h"

namespace tensorizer::format {
namespace {

using testing::expect_error;
using namespace std::string_literals;

struct Accepted {
  std::string stored;
  char order, kind;
  uint32_t itemsize;
  std::string torch_name;
};

TEST(StoredDtype, EveryTypeOfTheTablesIsRead) {
  for (const Accepted& c : std::vector<Accepted>{
           {"<f2", '<', 'f', 2, ""},
           {"<f4", '<', 'f', 4, ""},
           {"<f8", '<', 'f', 8, ""},
           {"<c8", '<', 'c', 8, ""},
           {"<c16", '<', 'c', 16, ""},
           {"|i1", '|', 'i', 1, ""},
           {"<i2", '<', 'i', 2, ""},
           {"<i4", '<', 'i', 4, ""},
           {"<i8", '<', 'i', 8, ""},
           {"|u1", '|', 'u', 1, ""},
           {"<u2", '<', 'u', 2, ""},
           {"<u4", '<', 'u', 4, ""},
           {"<u8", '<', 'u', 8, ""},
           {"|b1", '|', 'b', 1, ""},
           {">f4", '>', 'f', 4, ""},
           {"=f4", '=', 'f', 4, ""},
           {"f4", '=', 'f', 4, ""},
           {"<f4\0torch.nonsense"s, '<', 'f', 4, ""},  // ignored
           {"<f4\0"s, '<', 'f', 4, ""},
           {"<V2\0torch.bfloat16"s, '<', 'V', 2, "torch.bfloat16"},
           {"|V1\0torch.float8_e4m3fn"s, '|', 'V', 1, "torch.float8_e4m3fn"},
           {"<V4\0torch.complex32"s, '<', 'V', 4, "torch.complex32"},
           {"<V4\0torch.chalf"s, '<', 'V', 4, "torch.chalf"},
           {"<V2\0torch.uint16"s, '<', 'V', 2, "torch.uint16"},
           {"<V8\0torch.of_tomorrow"s, '<', 'V', 8, "torch.of_tomorrow"},
           {">V2\0torch.bfloat16"s, '>', 'V', 2, "torch.bfloat16"},
       }) {
    SCOPED_TRACE(c.stored);
    const StoredDtype dtype = parse_dtype(c.stored);
    EXPECT_EQ(dtype.byte_order, c.order);
    EXPECT_EQ(dtype.kind, c.kind);
    EXPECT_EQ(dtype.itemsize, c.itemsize);
    EXPECT_EQ(dtype.torch_name, c.torch_name);
    EXPECT_EQ(dtype.opaque(), c.kind == 'V');
  }
}

TEST(StoredDtype, EverythingElseIsMalformed) {
  for (const std::string& stored :
       std::vector<std::string>{"",
                                "<",
                                "f",
                                "<f",
                                "4",
                                "<4",
                                "<f04",
                                "<f0",
                                "<f4x",
                                "<f-4",
                                "<f 4",
                                " <f4",
                                "<<f4",
                                "<f4294967300",
                                "<f99999999999999999999",
                                "f4,",
                                "(2,)f4",
                                "<x4",
                                "float32",
                                "?",
                                "\xff",
                                "<f1",
                                "<f3",
                                "<f16",
                                "<c4",
                                "<c32",
                                "<i3",
                                "<i16",
                                "<u16",
                                "<b2",
                                "|b8",
                                "<U4",
                                "|S4",
                                "|O8",
                                "<M8",
                                "<M8[ns]",
                                "<m8[s]",
                                "|a4",
                                "<V3\0torch.bits"s,
                                "<V16\0torch.complex128"s,
                                "<V0\0torch.x"s,
                                "<V2",
                                "<V2\0"s,
                                "<V2\0bfloat16"s,
                                "<V2\0torch."s,
                                "<V2\0torch"s,
                                "<V2\0torch.1x"s,
                                "<V2\0torch.a b"s,
                                "<V2\0torch.nn.x"s,
                                "<V2\0Torch.bfloat16"s,
                                "<V2\0torch.\xC3\xA9"s,
                                "<V2\0torch.bfloat16\0"s,
                                "<V2\0torch.bfloat16\0x"s,
                                "<f4\0x\0y"s,
                                "<f4\0\0"s,
                                "<f4\0\xff"s,
                                "\0<f4"s,
                                "<V4\0torch.bfloat16"s,  // the size contradicts the type
                                "|V1\0torch.float32"s}) {
    SCOPED_TRACE(stored);
    expect_error(Errc::malformed, [&] { parse_dtype(stored); });
  }
}

TEST(StoredDtype, ABareVoidIsReadOnlyWhereItIsAllowed) {
  EXPECT_EQ(parse_dtype("<V2", true).itemsize, 2u);
  EXPECT_TRUE(parse_dtype("<V2", true).torch_name.empty());
  expect_error(Errc::malformed, [] { parse_dtype("<V2"); });
  expect_error(Errc::malformed, [] { parse_dtype("<V2\0"s, true); });
  expect_error(Errc::malformed, [] { parse_dtype("<V3", true); });
}

TEST(StoredDtype, SpellingsOfOneTypeAreTheSameType) {
  const auto same = [](const std::string& a, const std::string& b) {
    return same_dtype(parse_dtype(a), parse_dtype(b)) && same_dtype(parse_dtype(b), parse_dtype(a));
  };
  EXPECT_TRUE(same("<u2", "<V2\0torch.uint16"s));
  EXPECT_TRUE(same("<V4\0torch.chalf"s, "<V4\0torch.complex32"s));
  EXPECT_TRUE(same("<f4", "=f4"));
  EXPECT_TRUE(same("|u1", ">u1"));
  EXPECT_TRUE(same("<f4", "<f4\0torch.anything"s));
  EXPECT_TRUE(same("<f2", "<V2\0torch.half"s));
  EXPECT_TRUE(same("|V1\0torch.new_type"s, "|V1\0torch.new_type"s));
  EXPECT_FALSE(same("<f4", ">f4"));
  EXPECT_FALSE(same("<f4", "<i4"));
  EXPECT_FALSE(same("<f4", "<f8"));
  EXPECT_FALSE(same("<u2", "<V2\0torch.int16"s));
  EXPECT_FALSE(same("<V2\0torch.bfloat16"s, "<f2"));
  EXPECT_FALSE(same("<V2\0torch.bfloat16"s, "<V2\0torch.float16"s));
  EXPECT_FALSE(same("|V1\0torch.new_type"s, "|V1\0torch.other_type"s));
}

}  // namespace
}  // namespace tensorizer::format
