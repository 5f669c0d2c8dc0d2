#include <random>

#include "bytes.h"
#include "format/index.h"
#include "format/tensor_path.h"

namespace tensorizer::format {
namespace {

using testing::Build;
using testing::Bytes;
using testing::expect_error;
using testing::to_hex;
using namespace std::string_literals;

constexpr uint64_t kOrigin = kPrologueNbytes;
constexpr uint64_t kHeader = 80;  // room for a record header

struct Entry {
  std::string name = "w";
  uint8_t type = 2;
  std::string dtype = "<f4";
  std::vector<uint64_t> shape = {2};
  uint64_t offset = 70000;
  uint64_t data_offset = 70000 + kHeader;
  uint64_t data_nbytes = 8;
  uint32_t tag = 0;  // 0: none
  bool wide = false;
};

Bytes block_of(const std::vector<Entry>& entries, size_t slack = 0) {
  Build out;
  for (const Entry& e : entries) {
    if (e.tag != 0) out.le(e.tag);
    out.le(static_cast<uint16_t>(e.name.size())).text(e.name).le(e.type);
    out.le(static_cast<uint8_t>(e.dtype.size()))
        .text(e.dtype)
        .le(static_cast<uint8_t>(e.shape.size()));
    for (const uint64_t dim : e.shape) {
      if (e.wide) {
        out.le(dim);
      } else {
        out.le(static_cast<uint32_t>(dim));
      }
    }
    out.le(e.offset).le(e.data_offset).le(e.data_nbytes);
  }
  return out.zeros(slack);
}

Prologue prologue_for(uint64_t count, uint64_t nbytes, bool tagged) {
  Prologue prologue;
  prologue.version = tagged ? 5 : 1;
  prologue.flags = tagged ? kFlagVersionedHeaders : 0;
  prologue.tensor_count = count;
  prologue.metadata_nbytes = nbytes;
  return prologue;
}

Index index_of(const std::vector<Entry>& entries, size_t slack = 0, uint64_t source = UINT64_MAX) {
  Bytes block = block_of(entries, slack);
  const bool tagged = !entries.empty() && entries[0].tag != 0;
  const Prologue prologue = prologue_for(entries.size(), block.size(), tagged);
  return Index(prologue, std::move(block), kOrigin, source);
}

void expect_malformed(const Entry& entry, const std::string& part_of_message = {}) {
  const auto text = expect_error(Errc::malformed, [&] { index_of({entry}); });
  EXPECT_NE(text.find(part_of_message), std::string::npos) << text;
}

template <class Change>
Entry changed(Change change) {
  Entry entry;
  change(entry);
  return entry;
}

TEST(Index, FieldsComeBack) {
  const Index index =
      index_of({Entry{"a", 0, "<f4", {2, 3}, 1200, 1300, 24},
                Entry{"\x1e[\"b\",0]", 2, "<V2\0torch.bfloat16"s, {}, 1324, 1424, 2},
                Entry{"c", 1, "|u1", {0, 5}, 1426, 1526, 0}},
               50);
  ASSERT_EQ(index.size(), 3u);
  EXPECT_EQ(index[0].name, "a");
  EXPECT_EQ(index[0].type, TensorType::parameter);
  EXPECT_EQ(index[0].dtype, "<f4");
  EXPECT_EQ(std::vector<uint64_t>(index[0].shape.begin(), index[0].shape.end()),
            (std::vector<uint64_t>{2, 3}));
  EXPECT_EQ(index[0].offset, 1200u);
  EXPECT_EQ(index[0].header_nbytes(), 100u);
  EXPECT_EQ(index[0].end(), 1324u);
  EXPECT_EQ(index[0].itemsize, 4u);
  EXPECT_EQ(index[0].loaded_nbytes, 24u);
  EXPECT_EQ(index[1].name, "\x1e[\"b\",0]");
  EXPECT_TRUE(index[1].shape.empty());
  EXPECT_EQ(index[1].loaded_nbytes, 2u);
  EXPECT_EQ(index[2].type, TensorType::buffer);
  EXPECT_EQ(index[2].loaded_nbytes, 0u);
  EXPECT_FALSE(index[2].zero_filled());
}

TEST(Index, BorrowsFromItselfWhereverItIsMoved) {
  Index first = index_of({Entry{}});
  const Index second = std::move(first);
  EXPECT_EQ(second[0].name, "w");
  EXPECT_EQ(second[0].shape[0], 2u);
}

TEST(Index, ShapesStayValidWhileMoreTensorsAreRead) {
  std::vector<Entry> entries;
  for (uint64_t i = 0; i < 3000; ++i) {
    Entry e;
    e.name = "t" + std::to_string(i);
    e.shape = std::vector<uint64_t>(i % 9, 1);
    e.shape.push_back(i + 1);
    e.dtype = "|u1";
    e.data_nbytes = i + 1;
    e.offset = entries.empty() ? 1 << 20 : entries.back().data_offset + entries.back().data_nbytes;
    e.data_offset = e.offset + kHeader;
    entries.push_back(e);
  }
  const Index index = index_of(entries);
  for (size_t i = 0; i < entries.size(); ++i) {
    ASSERT_EQ(index[i].shape.size(), i % 9 + 1);
    ASSERT_EQ(index[i].shape.back(), i + 1);
  }
}

TEST(Index, WithoutTensorsIsMalformed) {
  expect_error(Errc::malformed, [] { Index(prologue_for(0, 0, false), {}, kOrigin, 1000); });
  expect_error(Errc::malformed,
               [] { Index(prologue_for(0, 64, false), Bytes(64), kOrigin, 1000); });
  expect_error(Errc::malformed, [] { Index(prologue_for(5, 0, false), {}, kOrigin, 1000); });
}

TEST(Index, ACountThatNoBlockCouldHoldCostsNoMemory) {
  for (const uint64_t count : {uint64_t{3}, uint64_t{1} << 32, ~uint64_t{0}}) {
    expect_error(Errc::malformed,
                 [&] { Index(prologue_for(count, 64, false), Bytes(64), kOrigin, 1000); });
  }
}

TEST(Index, ACountBeyondTheEntriesIsMalformedInAPaddedBlock) {
  const Bytes block = block_of({Entry{}}, 1000);
  expect_error(Errc::malformed,
               [&] { Index(prologue_for(2, block.size(), false), block, kOrigin, 1 << 20); });
}

TEST(Index, ACountBelowTheEntriesHidesTheRest) {
  Entry second;
  second.name = "second";
  const Bytes block = block_of({Entry{}, second});
  EXPECT_EQ(Index(prologue_for(1, block.size(), false), block, kOrigin, 1 << 20).size(), 1u);
}

TEST(Index, EveryCutThroughAnEntryIsMalformed) {
  Entry e;
  e.shape = {1, 2};
  const Bytes whole = block_of({e});
  for (size_t n = 0; n < whole.size(); ++n) {
    const Bytes cut(whole.begin(), whole.begin() + static_cast<long>(n));
    expect_error(Errc::malformed, [&] { Index(prologue_for(1, n, false), cut, kOrigin, 1 << 20); });
  }
}

TEST(Index, NamesFollowThePathRules) {
  const auto two = [](std::string a, std::string b) {
    Entry x, y;
    x.name = std::move(a), y.name = std::move(b);
    y.offset = x.data_offset + x.data_nbytes, y.data_offset = y.offset + kHeader;
    return index_of({x, y});
  };
  EXPECT_EQ(two("a", "b").size(), 2u);
  expect_error(Errc::malformed, [&] { two("a", "a"); });
  expect_error(Errc::malformed, [&] { two("a", "\x1e[\"a\"]"); });
  expect_error(Errc::malformed, [&] { two("a", "\x1e[\"a\",0]"); });
  expect_error(Errc::malformed, [&] { two("a", "\x1e[0]"); });
  expect_malformed(changed([](Entry& e) { e.name = ""; }), "empty");
  expect_malformed(changed([](Entry& e) { e.name = "\xff"; }), "UTF-8");
  expect_malformed(changed([](Entry& e) { e.name = "\x1e[true]"; }), "no string");
}

TEST(Index, TensorTypesBeyond2AreMalformed) {
  expect_malformed(changed([](Entry& e) { e.type = 3; }), "tensor type 3");
  expect_malformed(changed([](Entry& e) { e.type = 255; }));
}

TEST(Index, DtypesAreCheckedAndTheTensorIsNamed) {
  expect_malformed(changed([](Entry& e) { e.dtype = "<U4"; }), "tensor 'w'");
  expect_malformed(changed([](Entry& e) { e.dtype = ""; }));
  expect_malformed(changed([](Entry& e) { e.dtype = "<V4"; }));
  Entry bare;
  bare.dtype = "<V4", bare.data_nbytes = 0;
  EXPECT_TRUE(index_of({bare})[0].zero_filled());
}

TEST(Index, DataShorterThanTheShapeIsMalformedLongerIsSurplus) {
  expect_malformed(changed([](Entry& e) { e.data_nbytes = 7; }), "want 8 bytes, its data has 7");
  EXPECT_EQ(index_of({changed([](Entry& e) { e.data_nbytes = 9; })})[0].loaded_nbytes, 8u);
  const Index none = index_of({changed([](Entry& e) { e.data_nbytes = 0; })});
  EXPECT_TRUE(none[0].zero_filled());
  EXPECT_EQ(none[0].loaded_nbytes, 8u);
}

TEST(Index, RecordsLieInFileOrderWithoutOverlap) {
  expect_malformed(changed([](Entry& e) { e.offset = 0, e.data_offset = kHeader; }),
                   "begins before");
  expect_malformed(changed([](Entry& e) { e.data_offset = e.offset - 1; }), "no room");
  expect_malformed(changed([](Entry& e) { e.data_offset = e.offset; }), "no room");
  expect_malformed(changed([](Entry& e) { e.data_offset = e.offset + 28; }), "no room");
  Entry first, second;
  second.name = "v";
  second.offset = first.data_offset + first.data_nbytes,
  second.data_offset = second.offset + kHeader;
  EXPECT_EQ(index_of({first, second}).size(), 2u);
  expect_error(Errc::malformed, [&] { index_of({second, first}); });
  second.offset -= 1;
  expect_error(Errc::malformed, [&] { index_of({first, second}); });
  second.offset += 5000, second.data_offset += 5000;  // a gap may hold records that nobody lists
  EXPECT_EQ(index_of({first, second}).size(), 2u);
}

TEST(Index, AnExtentBeyondTheSourceIsTruncation) {
  Entry e;
  const uint64_t end = e.data_offset + e.data_nbytes;
  EXPECT_EQ(index_of({e}, 0, end).size(), 1u);
  const auto text = expect_error(Errc::truncated, [&] { index_of({e}, 0, end - 1); });
  EXPECT_NE(text.find(std::to_string(end)), std::string::npos) << text;
  EXPECT_NE(text.find(std::to_string(end - 1)), std::string::npos) << text;
}

TEST(Index, ExtentsThatWrapAroundAreMalformed) {
  expect_malformed(
      changed([](Entry& e) { e.offset = UINT64_MAX - 10, e.data_offset = UINT64_MAX; }));
  expect_malformed(changed([](Entry& e) {
    e.offset = UINT64_MAX - 1000, e.data_offset = UINT64_MAX - 100, e.dtype = "|u1";
    e.shape = {200}, e.data_nbytes = 200;
  }));
  expect_malformed(changed([](Entry& e) { e.data_nbytes = uint64_t{1} << 63; }), "too large");
}

TEST(Index, ShapesThatNoTensorHasAreMalformed) {
  const auto shaped = [](std::vector<uint64_t> shape, bool wide = true) {
    Entry e;
    e.shape = std::move(shape), e.data_nbytes = 0;
    e.tag = wide ? 5 : 1, e.wide = wide;
    return e;
  };
  EXPECT_TRUE(index_of({shaped({uint64_t{1} << 40, 1 << 20})})[0].zero_filled());  // 2^62 bytes
  expect_malformed(shaped({uint64_t{1} << 40, 1 << 21}), "shape is too large");
  expect_malformed(shaped({uint64_t{1} << 63}), "shape is too large");
  expect_malformed(shaped({UINT64_MAX, UINT64_MAX, UINT64_MAX}), "shape is too large");
  expect_malformed(shaped({UINT64_MAX, 0}), "shape is too large");
  expect_malformed(shaped({uint64_t{1} << 62, 0, 2}), "shape is too large");
  expect_malformed(shaped(std::vector<uint64_t>(255, UINT32_MAX), false), "shape is too large");
  EXPECT_EQ(index_of({shaped({uint64_t{1} << 32, 0})})[0].loaded_nbytes, 0u);
  EXPECT_EQ(index_of({shaped(std::vector<uint64_t>(255, 1), false)})[0].loaded_nbytes, 4u);
}

TEST(Index, TagsSayHowWideTheDimensionsAre) {
  Entry a, b;
  a.tag = 1;
  b.name = "z", b.tag = 5, b.wide = true, b.shape = {uint64_t{1} << 32, 0}, b.data_nbytes = 0;
  b.offset = a.data_offset + a.data_nbytes, b.data_offset = b.offset + kHeader;
  const Index index = index_of({a, b});
  EXPECT_FALSE(index[0].wide_dims());
  EXPECT_TRUE(index[1].wide_dims());
  EXPECT_EQ(index[1].shape[0], uint64_t{1} << 32);
  for (const uint32_t tag : {2u, 3u, 4u, 6u, 256u + 5u}) {
    Entry c;
    c.tag = tag;
    expect_malformed(c, "entry version " + std::to_string(tag));
  }
}

TEST(Index, ErrorsShortenAndEscapeNames) {
  Entry e;
  e.name = std::string(60000, 'n').append("\x1b[31m");
  e.type = 9;
  const auto text = expect_error(Errc::malformed, [&] { index_of({e}); });
  EXPECT_LT(text.size(), 300u);
  EXPECT_EQ(text.find('\x1b'), std::string::npos);
}

// --- writing ---

TEST(IndexEntryToWrite, SizesMatchWhatIsWrittenAndItReadsBack) {
  std::mt19937 generator(1);
  for (int round = 0; round < 300; ++round) {
    std::vector<uint64_t> shape(generator() % 6);
    for (uint64_t& dim : shape) dim = generator() % 3;
    if (!shape.empty() && round % 4 == 0)
      shape[0] = (uint64_t{1} << 32) + generator() % 5, shape.push_back(0);
    const std::string name = "name" + std::string(generator() % 50, 'x');
    const EntryToWrite entry{name, "<f8", shape, TensorType::buffer, 1000, 1200, 1 << 12};
    const bool tagged = is_long(entry.shape) || round % 2 == 0;
    Bytes out(3);
    append_index_entry(out, entry, tagged);
    ASSERT_EQ(out.size(), 3 + index_entry_nbytes(entry, tagged));
    const Index index(prologue_for(1, out.size() - 3, tagged), Bytes(out.begin() + 3, out.end()),
                      kOrigin, UINT64_MAX);
    ASSERT_EQ(index[0].name, name);
    ASSERT_TRUE(std::ranges::equal(index[0].shape, shape));
    ASSERT_EQ(index[0].wide_dims(), is_long(entry.shape));
    ASSERT_EQ(index[0].type, TensorType::buffer);
    ASSERT_EQ(index[0].data_offset, 1200u);
  }
}

TEST(IndexEntryToWrite, TheBoundaryOfLongDimensionsIs2ToThe32) {
  EXPECT_FALSE(is_long(std::vector<uint64_t>{UINT32_MAX}));
  EXPECT_TRUE(is_long(std::vector<uint64_t>{uint64_t{UINT32_MAX} + 1}));
}

TEST(IndexEntryToWrite, FieldsThatDoNotFitAreTheCallersMistake) {
  const auto append = [](std::string_view name, std::string_view dtype,
                         const std::vector<uint64_t>& shape) {
    Bytes out;
    append_index_entry(out, {name, dtype, shape, TensorType::buffer, 0, 0, 0}, false);
  };
  expect_error(Errc::out_of_range, [&] { append(std::string(65536, 'a'), "<f4", {}); });
  expect_error(Errc::out_of_range, [&] { append("a", std::string(256, 'a'), {}); });
  expect_error(Errc::out_of_range, [&] { append("a", "<f4", std::vector<uint64_t>(256, 1)); });
  expect_error(Errc::out_of_range, [&] { append("a", "<f4", {uint64_t{1} << 32}); });
}

}  // namespace
}  // namespace tensorizer::format
