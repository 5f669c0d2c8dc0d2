// Stored names: what is accepted, what is refused, how paths are spelled, and the tree that all of
// a file make.
#include <random>

#include "bytes.h"
#include "format/tensor_path.h"
#include "format/utf8.h"

namespace tensorizer::format {
namespace {

using testing::expect_error;
using namespace std::string_literals;

PathComponent key(std::string text) { return text; }
PathComponent at(std::string digits) { return PathIndex{std::move(digits)}; }

struct Accepted {
  std::string stored;
  TensorPath path;
};

const std::vector<Accepted> kAccepted = {
    {"w", {key("w")}},
    {".weight", {key(".weight")}},
    {"a.b\0c\n"s, {key("a.b\0c\n"s)}},
    {"[1]", {key("[1]")}},
    {"\xE5\x90\x8D", {key("\xE5\x90\x8D")}},
    {"\x1e[3]", {at("3")}},
    {"\x1e[0]", {at("0")}},
    {"\x1e[-0]", {at("0")}},
    {"\x1e[\"m\",\"l\",0,\"w\"]", {key("m"), key("l"), at("0"), key("w")}},
    {"\x1e[\"x\"]", {key("x")}},
    {"\x1e[\"\"]", {key("")}},
    {"\x1e[ \"sp\" \t, 1\t]", {key("sp"), at("1")}},
    {"\x1e[\"\\u001eabc\"]", {key("\x1e"s + "abc")}},
    {"\x1e[\"\xE5\x90\x8D\"]", {key("\xE5\x90\x8D")}},
    {"\x1e[\"\\\"\\\\\\/\\b\\f\\n\\r\\t\"]", {key("\"\\/\b\f\n\r\t")}},
    {"\x1e[\"\\u00e9\\u540D\"]", {key("\xC3\xA9\xE5\x90\x8D")}},
    {"\x1e[\"\\ud83d\\ude00\"]", {key("\xF0\x9F\x98\x80")}},
    {"\x1e[\"\\ud83d\"]", {key("\xED\xA0\xBD")}},  // a lone surrogate stays one
    {"\x1e[\"\\ud83d\\u0041\"]",
     {key("\xED\xA0\xBD"
          "A")}},
    {"\x1e[\"\\ude00\\ud83d\"]", {key("\xED\xB8\x80\xED\xA0\xBD")}},
    {"\x1e[\"\\u0000\"]", {key("\0"s)}},
    {"\x1e[\"\x7f\"]", {key("\x7f")}},
    {"\x1e[123456789012345678901234567890]", {at("123456789012345678901234567890")}},
    {"\x1e[\"[\",\"]\"]", {key("["), key("]")}},
};

const std::vector<std::string> kRefused = {
    "",
    "\xff",
    "\xC0\x80",          // overlong
    "\xED\xA0\x80",      // surrogate
    "\xF4\x90\x80\x80",  // beyond U+10FFFF
    "ab\xE5\x90",
    "\x1e",
    "\x1e[",
    "\x1e]",
    "\x1e[]",
    "\x1e[ ]",
    "\x1e{}",
    "\x1e[1",
    "\x1e"
    "1]",
    "\x1e [1]",
    "\x1e[1] ",
    "\x1e[1]]",
    "\x1e[1][2]",
    "\x1e[1 2]",
    "\x1e[,1]",
    "\x1e[1,]",
    "\x1e[1,,2]",
    "\x1e[01]",
    "\x1e[+1]",
    "\x1e[-1]",
    "\x1e[-]",
    "\x1e[--1]",
    "\x1e[1.0]",
    "\x1e[1e2]",
    "\x1e[1E2]",
    "\x1e[.5]",
    "\x1e[0x1]",
    "\x1e[NaN]",
    "\x1e[Infinity]",
    "\x1e[-Infinity]",
    "\x1e[null]",
    "\x1e[true]",
    "\x1e[false]",
    "\x1e[[1]]",
    "\x1e[[[[[[[[[[[[]",
    "\x1e[{\"a\":1}]",
    "\x1e[\"a\":1]",
    "\x1e['a']",
    "\x1e[a]",
    "\x1e[\"a]",
    "\x1e[\"a\"b]",
    "\x1e[\"\\x41\"]",
    "\x1e[\"\\u12\"]",
    "\x1e[\"\\u12g4\"]",
    "\x1e[\"\\u+123\"]",
    "\x1e[\"\\ud83d\\u12\"]",
    "\x1e[\"\\]",
    "\x1e[\"a\x01\"]",
    "\x1e[\"a\tb\"]",
    "\x1e[\"a\",\n1]",
    "\x1e[\"a\",\r1]",
    "\x1e[\"a\nb\"]",
    "\x1e[\"\xff\"]",
    "\x1e[\0]"s,
    "\x1e[1,\0]"s,
    "\x1e[1]\0]"s,
    "\x1e[" + std::string(4301, '7') + "]",
};

TEST(StoredName, EverySpellingOfTheTableIsAccepted) {
  for (const Accepted& c : kAccepted) {
    SCOPED_TRACE(display_name(c.stored));
    EXPECT_EQ(decode_name(c.stored), c.path);
  }
}

TEST(StoredName, EveryRowThatTheRulesRefuseIsMalformed) {
  for (const std::string& stored : kRefused) {
    SCOPED_TRACE(display_name(stored));
    expect_error(Errc::malformed, [&] { decode_name(stored); });
  }
}

TEST(StoredName, WhatIsAcceptedEncodesToANameOfTheSamePath) {
  for (const Accepted& c : kAccepted) {
    SCOPED_TRACE(display_name(c.stored));
    EXPECT_EQ(decode_name(encode_name(c.path)), c.path);
  }
}

TEST(StoredName, StructuredNamesAreWrittenAsTheReferenceWritesThem) {
  EXPECT_EQ(encode_name({key("m"), key("l"), at("0"), key("w")}), "\x1e[\"m\",\"l\",0,\"w\"]");
  EXPECT_EQ(encode_name({at("3")}), "\x1e[3]");
  EXPECT_EQ(encode_name({key("k/\"\\\n\x7f\xF0\x9F\x98\x80"), at("0")}),
            "\x1e[\"k/\\\"\\\\\\n\\u007f\\ud83d\\ude00\",0]");
  EXPECT_EQ(encode_name({key("\b\t\f\r\x01"), at("0")}), "\x1e[\"\\b\\t\\f\\r\\u0001\",0]");
}

TEST(StoredName, OneStringIsStoredPlainlyUnlessThePlainFormIsUnreadable) {
  EXPECT_EQ(encode_name({key("a.b\n")}), "a.b\n");
  EXPECT_EQ(encode_name({key("")}), "\x1e[\"\"]");
  EXPECT_EQ(encode_name({key("\x1e"
                             "abc")}),
            "\x1e[\"\\u001eabc\"]");
  EXPECT_EQ(encode_name({key("\xED\xA0\xBD")}), "\x1e[\"\\ud83d\"]");
}

TEST(StoredName, TheLongestNameFitsAndOneByteMoreIsTheCallersMistake) {
  EXPECT_EQ(encode_name({key(std::string(65535, 'x'))}).size(), 65535u);
  expect_error(Errc::out_of_range, [] { encode_name({key(std::string(65536, 'x'))}); });
  expect_error(Errc::invalid_argument, [] { encode_name({key("\xff"), at("0")}); });
}

TEST(StoredName, NestingOfAnyDepthIsRefusedWithoutRecursion) {
  expect_error(Errc::malformed,
               [] { decode_name("\x1e" + std::string(32767, '[') + std::string(32767, ']')); });
}

TEST(DisplayName, IsShortPrintableAndTellsNamesApart) {
  EXPECT_EQ(display_name("w"), "'w'");
  EXPECT_EQ(display_name("a\n\x1b[31m"), "'a\\x0a\\x1b[31m'");
  EXPECT_EQ(display_name("\xff\xE5\x90\x8D"), "'\\xff\xE5\x90\x8D'");
  EXPECT_EQ(display_name("\xE2\x80\xAE"
                         "x"),
            "'\\xe2\\x80\\xaex'");  // turns the direction of text around
  EXPECT_EQ(display_name("\x1e[\"a\",0]"), "[\"a\",0]");
  const std::string a = std::string(5000, 'a') + "weight", b = std::string(5000, 'a') + "bias";
  EXPECT_LE(display_name(a).size(), 110u);
  EXPECT_NE(display_name(a), display_name(b));
  EXPECT_LE(display_name(std::string(60000, '\x01')).size(), 180u);
  for (size_t n = 0; n < 200; ++n) {
    std::string wide;
    for (size_t i = 0; i < n; ++i) wide += "\xE5\x90\x8D";
    EXPECT_TRUE(is_utf8(display_name(wide))) << n;
    EXPECT_TRUE(is_utf8(display_name("x" + wide))) << n;
  }
}

TEST(Utf8, AcceptsEveryCodePointAndNothingElse) {
  for (uint32_t c = 0; c <= 0x10FFFF; c += (c < 0x3000 ? 1 : 37)) {
    std::string text = "........";  // the fast path looks at eight bytes
    append_utf8(text, c);
    ASSERT_EQ(is_utf8(text), !is_surrogate(c)) << c;
    const Utf8Char step = decode_utf8(std::string_view(text).substr(8), true);
    ASSERT_EQ(step.code_point, c);
    ASSERT_EQ(step.nbytes, text.size() - 8);
  }
}

// --- the tree ---

TEST(PathSet, PathsThatShareLayersOfOneKindAreAccepted) {
  PathSet paths;
  paths.add({key("a"), at("0"), key("w")});
  paths.add({key("a"), at("0"), key("b")});
  paths.add({key("a"), at("1")});
  paths.add({key("b")});
  paths.add({key("a.b")});
  paths.add({key("")});
}

TEST(PathSet, APathThatOccursTwiceIsRefusedInAnySpelling) {
  PathSet paths;
  paths.add({key("x")});
  paths.add({key("y"), at("2")});
  EXPECT_NE(expect_error(Errc::malformed, [&] { paths.add({key("x")}); }).find("'x' occurs twice"),
            std::string::npos);
  expect_error(Errc::malformed, [&] { paths.add(decode_name("\x1e[\"x\"]")); });
  expect_error(Errc::malformed, [&] { paths.add({key("y"), at("2")}); });
}

TEST(PathSet, ATensorCannotBeALayerToo) {
  PathSet paths;
  paths.add({key("a"), key("b")});
  expect_error(Errc::malformed, [&] { paths.add({key("a")}); });
  expect_error(Errc::malformed, [&] { paths.add({key("a")}); });
  expect_error(Errc::malformed, [&] { paths.add({key("a"), key("b"), key("c")}); });
  paths.add({key("leaf")});
  expect_error(Errc::malformed, [&] { paths.add({key("leaf"), at("0")}); });
}

TEST(PathSet, ALayerHasKeysOfOneKind) {
  PathSet dict;
  dict.add({key("0")});
  expect_error(Errc::malformed, [&] { dict.add({at("0")}); });
  PathSet list;
  list.add({at("1")});
  expect_error(Errc::malformed, [&] { list.add({key("a")}); });
  expect_error(Errc::malformed, [&] { list.add({key("a"), at("0")}); });
  list.add({at("2"), key("k")});
  expect_error(Errc::malformed, [&] { list.add({at("2"), at("0")}); });
}

TEST(PathSet, BlamesTheCallerWhenToldSo) {
  PathSet paths(Errc::invalid_argument);
  paths.add({key("x")});
  expect_error(Errc::invalid_argument, [&] { paths.add({key("x")}); });
  expect_error(Errc::invalid_argument, [&] { paths.add({}); });
}

TEST(PathSet, IsUnchangedAfterARefusal) {
  PathSet paths;
  paths.add({key("a"), at("0")});
  const size_t mark = paths.mark();
  expect_error(Errc::malformed, [&] { paths.add({key("a"), key("b"), key("c")}); });
  EXPECT_EQ(paths.mark(), mark);
  paths.add({key("a"), at("1")});
}

TEST(PathSet, ARollbackForgetsPathsAndTheKindsOfTheirLayers) {
  PathSet paths;
  const size_t empty = paths.mark();
  paths.add({at("0"), key("x")});
  paths.rollback(empty);
  paths.add({key("a"), at("0")});  // the root takes strings now
  const size_t mark = paths.mark();
  paths.add({key("b")});
  paths.add({key("a"), at("1"), key("deep"), key("er")});
  paths.rollback(mark);
  paths.add({key("b")});
  paths.add({key("a"), at("1"), at("0")});  // another kind below a[1] than before
  expect_error(Errc::malformed, [&] { paths.add({key("a"), at("0")}); });
}

TEST(PathSet, SurvivesGrowthBetweenMarks) {
  PathSet paths;
  const auto name = [](int i) { return "layer." + std::to_string(i) + ".weight"; };
  for (int i = 0; i < 100; ++i) paths.add({key(name(i))});
  const size_t mark = paths.mark();
  for (int i = 100; i < 5000; ++i) paths.add({key(name(i))});
  paths.rollback(mark);
  for (int i = 0; i < 100; ++i) expect_error(Errc::malformed, [&] { paths.add({key(name(i))}); });
  for (int i = 100; i < 5000; ++i) paths.add({key(name(i))});
  for (int i = 0; i < 5000; ++i) expect_error(Errc::malformed, [&] { paths.add({key(name(i))}); });
}

TEST(PathSet, PlainNamesAreCheckedByThemselves) {
  using Names = std::vector<std::string_view>;
  EXPECT_NO_THROW(check_paths(Names{}));
  EXPECT_NO_THROW(check_paths(Names{"b", "a", "a.b", "0"}));
  const std::string told =
      expect_error(Errc::malformed, [] { check_paths(Names{"b", "a", "c", "a"}); });
  EXPECT_NE(told.find("'a' occurs twice"), std::string::npos) << told;
  expect_error(Errc::malformed, [] { check_paths(Names{"a", ""}); });
  expect_error(Errc::malformed, [] { check_paths(Names{"a", "\xff"}); });
}

TEST(PathSet, AgreesWithAPlainListOfPathsInEveryOrder) {
  // The oracle compares each new path with all earlier ones.
  const auto fits = [](const std::vector<TensorPath>& all, const TensorPath& path) {
    for (const TensorPath& other : all) {
      size_t i = 0;
      while (i < path.size() && i < other.size() && path[i] == other[i]) ++i;
      if (i == path.size() || i == other.size()) return false;
      if (path[i].index() != other[i].index()) return false;
    }
    return true;
  };
  std::mt19937 generator(3);
  for (int round = 0; round < 300; ++round) {
    PathSet paths;
    std::vector<TensorPath> all;
    std::vector<size_t> marks;  // marks[n]: registry mark when n paths were in
    for (int step = 0; step < 40; ++step) {
      if (generator() % 10 == 0 && !marks.empty()) {
        const size_t keep = generator() % marks.size();
        paths.rollback(marks[keep]);
        all.resize(keep);
        marks.resize(keep);
      }
      TensorPath path;
      for (size_t depth = 1 + generator() % 3; depth > 0; --depth) {
        const std::string text(1, static_cast<char>('0' + generator() % 3));
        path.push_back(generator() % 4 == 0 ? at(text) : key(text));
      }
      const size_t mark = paths.mark();
      std::vector<std::string> stored{encode_name(path)};
      for (const TensorPath& other : all) stored.push_back(encode_name(other));
      const std::vector<std::string_view> names(stored.begin(), stored.end());
      if (fits(all, path)) {
        ASSERT_NO_THROW(check_paths(names));
        ASSERT_NO_THROW(paths.add(path));
        all.push_back(path);
        marks.push_back(mark);
      } else {
        ASSERT_THROW(check_paths(names), Error);
        ASSERT_THROW(paths.add(path), Error);
        ASSERT_EQ(paths.mark(), mark);
      }
    }
  }
}

}  // namespace
}  // namespace tensorizer::format
