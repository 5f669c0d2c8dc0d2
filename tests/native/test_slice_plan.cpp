// Parts of tensors as byte ranges: every byte of every part once, units that a buffer can hold, no
// more in vain than is worth it.
#include "load/slice_plan.h"

#include <gtest/gtest.h>

#include <array>
#include <random>

namespace tensorizer::load {
namespace {

constexpr uint64_t kKiB = 1024, kMiB = 1024 * kKiB;

std::vector<SliceDim> box(std::initializer_list<SliceDim> dims) { return dims; }

SlicePart part_of(std::vector<uint64_t> shape, uint32_t itemsize, std::vector<SliceDim> dims,
                  uint64_t payload = 4096, uint64_t chunk = 0) {
  uint64_t nbytes = itemsize;
  for (const uint64_t dim : shape) nbytes *= dim;
  return {.record = static_cast<uint32_t>(payload / 4096),
          .payload = payload,
          .payload_nbytes = nbytes,
          .chunk_nbytes = chunk,
          .runs = runs_of(shape, itemsize, dims)};
}

// Which byte of the payload each byte of the destination is, run by run.
std::vector<uint64_t> bytes_of(const SliceRuns& runs) {
  std::vector<uint64_t> bytes;
  for_each_run(runs, 0, runs.nbytes(), [&](uint64_t offset, uint64_t place, uint64_t nbytes) {
    EXPECT_EQ(place, bytes.size());
    for (uint64_t i = 0; i < nbytes; ++i) bytes.push_back(offset + i);
  });
  return bytes;
}

void expect_whole(std::span<const SlicePart> parts, const SlicePlanOptions& options) {
  const LoadPlan plan = plan_slices(parts, options);
  std::vector<std::vector<uint64_t>> done(parts.size());
  for (size_t i = 0; i < parts.size(); ++i) done[i].resize(parts[i].runs.nbytes());
  size_t next = 0;
  for (const Unit& unit : plan.units) {
    EXPECT_EQ(unit.first_piece, next);
    next += unit.piece_count;
    uint64_t placed = 0, end = unit.offset;
    for (const Piece& piece : plan.pieces_of(unit)) {
      const SlicePart& part = parts[piece.target];
      const uint64_t piece_begin = unit.offset + piece.unit_offset;
      const uint64_t piece_end = piece_begin + piece.span_nbytes;
      placed += piece.nbytes;
      if (unit.read == Unit::Read::scattered && part.chunk_nbytes == 0) {
        EXPECT_GE(piece_begin, end);
      }
      end = std::max(end, piece_end);
      for_each_run(part.runs, piece.place, piece.nbytes,
                   [&](uint64_t offset, uint64_t place, uint64_t nbytes) {
                     EXPECT_GE(part.payload + offset, piece_begin);
                     EXPECT_LE(part.payload + offset + nbytes, piece_end);
                     EXPECT_LE(part.payload + offset + nbytes, unit.offset + unit.nbytes);
                     for (uint64_t i = 0; i < nbytes; ++i) ++done[piece.target][place + i];
                   });
    }
    EXPECT_EQ(placed, unit.placed_nbytes);
    if (parts[plan.pieces[unit.first_piece].target].chunk_nbytes == 0) {
      EXPECT_LE(placed, options.unit_nbytes);
      if (unit.read != Unit::Read::separate_reads) {
        EXPECT_LE(unit.nbytes, options.unit_nbytes);
      }
    }
  }
  EXPECT_EQ(next, plan.pieces.size());
  for (const auto& counts : done) {
    for (const uint64_t count : counts) ASSERT_EQ(count, 1U);
  }
}

TEST(SlicePlan, RunsAreAsFewAndAsLongAsTheyCanBe) {
  const std::array<uint64_t, 3> shape{4, 6, 8};
  const auto runs = [&](std::initializer_list<SliceDim> dims) {
    return runs_of(shape, 2, box(dims));
  };
  EXPECT_TRUE(runs({{0, 4, 1}, {0, 6, 1}, {0, 8, 1}}).loops.empty());
  EXPECT_EQ(runs({{1, 2, 1}, {0, 6, 1}, {0, 8, 1}}).offset, 96U);
  EXPECT_EQ(runs({{1, 2, 1}, {0, 6, 1}, {0, 8, 1}}).run_nbytes, 192U);
  EXPECT_TRUE(runs({{2, 1, 1}, {1, 3, 1}, {0, 8, 1}}).loops.empty());
  EXPECT_EQ(runs({{0, 4, 1}, {0, 6, 1}, {2, 3, 1}}).loops.size(), 1U);  // 24 rows, one loop
  EXPECT_EQ(runs({{0, 4, 1}, {0, 6, 1}, {0, 4, 2}}).loops.size(),
            1U);  // every second element of all
  EXPECT_EQ(runs({{0, 4, 1}, {0, 6, 1}, {0, 4, 2}}).loops.front().count, 96U);
  EXPECT_EQ(runs({{0, 4, 1}, {1, 2, 2}, {2, 3, 1}}).loops.size(), 2U);
  EXPECT_EQ(runs({{0, 4, 1}, {1, 0, 2}, {2, 3, 1}}).nbytes(), 0U);
  EXPECT_EQ(runs_of({}, 4, {}).nbytes(), 4U);
}

TEST(SlicePlan, RunsNameTheBytesOfTheBoxInOrder) {
  std::mt19937 random(7);
  const auto below = [&](uint64_t n) {
    return std::uniform_int_distribution<uint64_t>(0, n - 1)(random);
  };
  for (int round = 0; round < 300; ++round) {
    std::vector<uint64_t> shape(below(4) + 1);
    std::vector<SliceDim> dims;
    for (uint64_t& size : shape) {
      size = below(6) + 1;
      const uint64_t start = below(size), step = below(3) + 1;
      dims.push_back({start, below((size - start + step - 1) / step + 1), step});
    }
    std::vector<uint64_t> expected{0};  // elements, dimension by dimension
    for (size_t d = 0; d < shape.size(); ++d) {
      std::vector<uint64_t> longer;
      for (const uint64_t at : expected)
        for (uint64_t i = 0; i < dims[d].count; ++i)
          longer.push_back(at * shape[d] + dims[d].start + i * dims[d].stride);
      expected = std::move(longer);
    }
    const std::vector<uint64_t> found = bytes_of(runs_of(shape, 2, dims));
    ASSERT_EQ(found.size(), 2 * expected.size());
    for (size_t i = 0; i < expected.size(); ++i) ASSERT_EQ(found[2 * i], 2 * expected[i]);
    for (const uint64_t unit : {uint64_t{16}, uint64_t{64}, kMiB})
      for (const uint64_t gap : {uint64_t{0}, uint64_t{10}, kMiB})
        for (const uint64_t chunk : {uint64_t{0}, uint64_t{12}})
          expect_whole(std::vector{part_of(shape, 2, dims, 4096, chunk)}, {.unit_nbytes = unit,
                                                                           .run_gap_nbytes = gap,
                                                                           .part_gap_nbytes = gap,
                                                                           .runs_at_once = 3});
  }
}

TEST(SlicePlan, PartsOverlapAndComeInAnyOrder) {
  const std::vector<SlicePart> parts{part_of({100, 64}, 4, box({{50, 50, 1}, {0, 64, 1}})),
                                     part_of({100, 64}, 4, box({{0, 60, 1}, {0, 64, 1}})),
                                     part_of({100, 64}, 4, box({{0, 100, 1}, {0, 32, 1}})),
                                     part_of({100, 64}, 4, box({{0, 100, 1}, {32, 32, 1}})),
                                     part_of({3000}, 1, box({{100, 200, 7}}), 40960)};
  for (const uint64_t unit : {uint64_t{1000}, 64 * kKiB, kMiB})
    expect_whole(parts, {.unit_nbytes = unit});
}

TEST(SlicePlan, WhatIsReadInVainIsBounded) {
  // Rows of large tensors with large gaps stay apart; scalars that are scattered come together.
  std::vector<SlicePart> large, small;
  for (uint64_t i = 0; i < 8; ++i) {
    large.push_back(part_of({2048, 256}, 4, box({{0, 1024, 1}, {0, 256, 1}}), 4096 + i * 4 * kMiB));
    small.push_back(part_of({}, 4, {}, 4096 + i * 100 * kKiB));
  }
  const SlicePlanOptions remote{.run_gap_nbytes = kMiB, .part_gap_nbytes = kMiB, .runs_at_once = 1};
  uint64_t read = 0;
  for (const Unit& unit : plan_slices(large, remote).units) read += unit.nbytes;
  EXPECT_EQ(read, 8 * kMiB);
  EXPECT_EQ(plan_slices(small, remote).units.size(), 1U);
  EXPECT_EQ(plan_slices(small, {}).units.size(), 8U);
}

TEST(SlicePlan, ManyRunsMakeASmallPlan) {
  const SlicePart columns = part_of({1 << 20, 1024}, 4, box({{0, 1 << 20, 1}, {0, 512, 2}}));
  const LoadPlan plan = plan_slices(std::span(&columns, 1), {});
  EXPECT_LE(plan.units.size(), 600U);
  EXPECT_LE(plan.pieces.size(), 600U);
}

}  // namespace
}  // namespace tensorizer::load
