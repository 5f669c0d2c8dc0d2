// What is read in which order: every byte of the selection once, units that a buffer can hold,
// large tensors dealt in turn. And which tensors share memory.
#include "load/load_plan.h"

#include <map>

#include "digest/deal.h"
#include "load/allocate.h"
#include "session_harness.h"

namespace tensorizer::load {
namespace {

constexpr uint64_t kKiB = 1024, kMiB = 1024 * kKiB;

// An index over a file that was saved with these payload sizes.
std::shared_ptr<const OpenedIndex> index_of(const std::vector<size_t>& sizes) {
  const tests::Bytes file = tests::save_all(tests::make_tensors(sizes, 1));
  tests::PlainSource source(file);
  return tests::open_all(source);
}

std::vector<uint32_t> all_of(const OpenedIndex& opened) {
  std::vector<uint32_t> all(opened.index.size());
  for (uint32_t i = 0; i < all.size(); ++i) all[i] = i;
  return all;
}

void expect_whole(const OpenedIndex& opened, const LoadPlan& plan, const PlanOptions& options) {
  std::map<uint32_t, uint64_t> done;
  std::map<uint32_t, uint32_t> steps, headers;
  for (const Unit& unit : plan.units) {
    uint64_t end = 0, payload = 0;
    for (const Piece& piece : plan.pieces_of(unit)) {
      const format::IndexEntry& entry = opened.index[piece.target];
      EXPECT_GE(piece.unit_offset, end);
      EXPECT_LE(piece.unit_offset - end, options.gap_nbytes);
      end = piece.unit_offset + piece.nbytes;
      if (piece.kind == Piece::Kind::header) {
        EXPECT_EQ(unit.offset + piece.unit_offset, entry.offset);
        EXPECT_EQ(piece.nbytes, entry.header_nbytes());
        ++headers[piece.target];
        continue;
      }
      EXPECT_EQ(headers[piece.target], 1U);  // the header comes before the payload
      EXPECT_EQ(unit.offset + piece.unit_offset, entry.data_offset + piece.place);
      EXPECT_EQ(piece.place, done[piece.target]);  // in order, nothing left out
      EXPECT_EQ(piece.place % options.cut_nbytes, 0U);
      EXPECT_EQ(piece.step, steps[piece.target]++);
      done[piece.target] += piece.nbytes;
      payload += piece.nbytes;
    }
    EXPECT_EQ(unit.nbytes, end);
    EXPECT_EQ(unit.placed_nbytes, payload);
    if (payload > 0) {
      EXPECT_LE(unit.nbytes, options.buffer_nbytes);
    }
  }
  for (uint32_t target = 0; target < opened.index.size(); ++target) {
    EXPECT_EQ(done[target], opened.index[target].data_nbytes) << target;
    EXPECT_EQ(headers[target], 1U) << target;
    if (plan.hash_steps[target] > 0) {
      EXPECT_EQ(plan.hash_steps[target], steps[target]);
    } else {
      EXPECT_LE(steps[target], 1U);
    }
  }
}

TEST(LoadPlan, CoversEveryByteOnceWhateverTheLimitsAre) {
  const auto opened = index_of({0, 1, 4096, 100'000, 700'000, 3 * kMiB, 5 * kMiB + 1, 17, 0,
                                2 * kMiB, 300'000, 300'000, 8 * kMiB});
  for (const uint64_t unit : {64 * kKiB, 1 * kMiB, 2 * kMiB, 8 * kMiB}) {
    for (const uint64_t cut : {4 * kKiB, 2 * kMiB}) {
      for (const size_t dealt : {0, 1, 3, 50}) {
        for (const bool buffered : {false, true}) {
          PlanOptions options{.unit_nbytes = unit,
                              .cut_nbytes = cut,
                              .large_at_once = dealt,
                              .spread = dealt == 0 && !buffered};
          if (buffered) options.buffer_nbytes = std::max(unit, cut);
          expect_whole(*opened, plan_load(opened->index, all_of(*opened), options), options);
        }
      }
    }
  }
}

TEST(LoadPlan, AHeaderThatLeavesNoRoomInABufferIsAUnitOfItsOwn) {
  const auto opened = index_of({2 * kMiB, 4 * kMiB});
  const PlanOptions options{
      .unit_nbytes = 2 * kMiB, .cut_nbytes = 2 * kMiB, .buffer_nbytes = 2 * kMiB};
  const LoadPlan plan = plan_load(opened->index, all_of(*opened), options);
  expect_whole(*opened, plan, options);
  ASSERT_EQ(plan.units.size(), 5U);
  EXPECT_EQ(plan.units[0].placed_nbytes, 0U);
  EXPECT_EQ(plan.hash_steps, (std::vector<uint32_t>{1, 2}));
}

TEST(LoadPlan, LargeTensorsAreDealtInTurnAndSmallOnesStayTogether) {
  const auto opened = index_of({4 * kMiB, 100, 200, 3 * kMiB, 2 * kMiB});
  const auto order_of = [&](const PlanOptions& options) {
    const LoadPlan plan = plan_load(opened->index, all_of(*opened), options);
    expect_whole(*opened, plan, options);
    std::vector<uint32_t> order;
    for (const Unit& unit : plan.units) order.push_back(plan.pieces[unit.first_piece].target);
    return order;
  };
  // Both small ones are one unit, in the middle; the large ones are under way all the time.
  EXPECT_EQ(order_of({.unit_nbytes = kMiB, .spread = true}),
            (std::vector<uint32_t>{0, 3, 4, 0, 3, 0, 1, 4, 3, 0, 4, 3, 0}));
  // By way of buffers two at a time, in the order of the file.
  EXPECT_EQ(order_of({.unit_nbytes = kMiB, .buffer_nbytes = 64 * kMiB, .large_at_once = 2}),
            (std::vector<uint32_t>{0, 1, 0, 3, 0, 3, 0, 3, 0, 3, 4, 4, 4}));
}

TEST(LoadPlan, StreamsShareTheBytesAndBeginWithARecord) {
  const auto opened = index_of({300'000, 3 * kMiB, 5 * kMiB + 1, 17, 0, 2 * kMiB, 4 * kMiB, kMiB,
                                100, 6 * kMiB, 300'000, 2 * kMiB, 3 * kMiB});
  uint64_t total = 0, largest = 0;
  for (uint32_t i = 0; i < opened->index.size(); ++i) {
    total += opened->index[i].data_nbytes;
    largest = std::max(largest, opened->index[i].data_nbytes);
  }
  for (const size_t streams : {1, 2, 3, 4}) {
    const PlanOptions options{.unit_nbytes = kMiB, .streams = streams};
    const LoadPlan plan = plan_load(opened->index, all_of(*opened), options);
    expect_whole(*opened, plan, options);
    ASSERT_EQ(plan.stream_begins.size(), streams);
    EXPECT_EQ(plan.stream_begins[0], 0U);
    for (size_t i = 0; i < streams; ++i) {
      const size_t begin = plan.stream_begins[i];
      const size_t end = i + 1 < streams ? plan.stream_begins[i + 1] : plan.units.size();
      ASSERT_LT(begin, end);
      EXPECT_EQ(plan.pieces_of(plan.units[begin]).front().kind, Piece::Kind::header);
      uint64_t nbytes = 0;
      for (size_t unit = begin; unit < end; ++unit) nbytes += plan.units[unit].placed_nbytes;
      EXPECT_LE(nbytes, total / streams + largest);
      EXPECT_GE(nbytes + largest, total / streams);
    }
  }
  const auto one = index_of({9 * kMiB});
  EXPECT_EQ(plan_load(one->index, all_of(*one), {.unit_nbytes = kMiB, .streams = 4}).stream_begins,
            std::vector<uint32_t>{0});
}

TEST(LoadPlan, ALongPayloadIsAStepToHashEvenWhereItIsWithItsHeader) {
  const auto opened = index_of({200, 4000, 1000, 1001, 5000});
  const PlanOptions options{.unit_nbytes = kMiB, .whole_nbytes = 1000};
  const LoadPlan plan = plan_load(opened->index, all_of(*opened), options);
  expect_whole(*opened, plan, options);
  EXPECT_EQ(plan.units.size(), 1U);
  EXPECT_EQ(plan.hash_steps, (std::vector<uint32_t>{0, 1, 0, 1, 1}));
}

TEST(MemoryPlan, SmallTensorsShareMemoryAcrossLargeOnesUpTo16MiB) {
  const auto opened =
      index_of({8 * kMiB, 100, 9 * kMiB, 200, 0, 7 * kMiB, 8 * kMiB, 7 * kMiB, 3 * kMiB});
  std::vector<LoadTarget> targets;
  for (const uint32_t entry : all_of(*opened)) targets.push_back({.entry = entry});
  std::vector<std::vector<uint32_t>> members;
  for (const MemoryGroup& group : group_memory(*opened, false, {nullptr, 512}, targets)) {
    members.emplace_back();
    uint64_t end = 0;
    for (const MemoryGroup::Member& member : group.members) {
      EXPECT_EQ(member.place % 512, 0U);
      EXPECT_GE(member.place, end);
      EXPECT_EQ(member.nbytes, opened->index[targets[member.target].entry].data_nbytes);
      end = member.place + member.nbytes;
      members.back().push_back(member.target);
    }
    EXPECT_EQ(group.nbytes, end);
    EXPECT_TRUE(members.back().size() == 1 || group.nbytes <= 16 * kMiB);
  }
  EXPECT_EQ(members, (std::vector<std::vector<uint32_t>>{{0}, {1, 3, 5, 7}, {2}, {6}, {8}}));
}

TEST(Deal, KeepsTheOrderWithinARecordAndTakesEveryUnitOnce) {
  const std::vector<uint32_t> records{7, 7, 7, digest::kNoRecord, digest::kNoRecord, 8, 8, 9};
  EXPECT_EQ(digest::deal(records, 1, 1), (std::vector<uint32_t>{0, 1, 2, 3, 4, 5, 6, 7}));
  EXPECT_EQ(digest::deal(records, 2, 2), (std::vector<uint32_t>{0, 3, 1, 4, 2, 5, 6, 7}));
  EXPECT_EQ(digest::deal(records, 9, 9), (std::vector<uint32_t>{0, 3, 4, 5, 7, 1, 6, 2}));
  EXPECT_TRUE(digest::deal({}, 3, 3).empty());
}

TEST(Spread, BringsEveryRecordForwardInProportionToItsLength) {
  std::vector<uint32_t> records(40, 0);
  records.insert(records.end(), 10, 1);
  records.insert(records.end(), 4, digest::kNoRecord);
  records.insert(records.end(), 20, 2);
  const std::vector<uint32_t> order = digest::spread(records);
  ASSERT_EQ(order.size(), records.size());
  std::map<uint32_t, double> nbegun;
  std::map<uint32_t, uint32_t> last;
  const std::map<uint32_t, double> length{{0, 40}, {1, 10}, {2, 20}, {digest::kNoRecord, 4}};
  for (size_t i = 0; i < order.size(); ++i) {
    const uint32_t record = records[order[i]];
    if (nbegun[record]++ > 0) {
      EXPECT_GT(order[i], last[record]) << "a unit before an earlier one";
    }
    last[record] = order[i];
    for (const auto& [each, units] : length) {
      const double share = static_cast<double>(i + 1) / static_cast<double>(order.size());
      EXPECT_NEAR(nbegun[each], share * units, 1.0) << each << " after " << i + 1 << " units";
    }
  }
  EXPECT_TRUE(digest::spread({}).empty());
}

TEST(Deal, AnotherRecordBeginsOnlyAfterEightUnits) {
  std::vector<uint32_t> records;
  for (const uint32_t record : {0, 1, 2}) records.insert(records.end(), 14, record);
  std::vector<uint32_t> dealt;  // the record of each unit
  for (const uint32_t unit : digest::deal(records, 3, 1)) dealt.push_back(records[unit]);
  const std::vector<uint32_t> first(8, 0);
  const std::vector<uint32_t> then{0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 2, 0, 1, 2};
  EXPECT_EQ(std::vector(dealt.begin(), dealt.begin() + 8), first);
  EXPECT_EQ(std::vector(dealt.begin() + 8, dealt.begin() + 22), then);
}

}  // namespace
}  // namespace tensorizer::load
