// Which pieces become one copy.
#include <gtest/gtest.h>

#include "device/cuda/copy_stream.h"
#include "device_harness.h"

namespace tensorizer::device::cuda::tests {
namespace {

std::byte* at(uintptr_t address) { return reinterpret_cast<std::byte*>(address); }

TEST(CudaPieces, ThatContinueEachOtherOnBothSidesBecomeOneCopy) {
  const std::vector<CopyPiece> pieces{{0, at(1000), 10}, {10, at(1010), 0},
                                      {10, at(1010), 5},  // one
                                      {15, at(2000), 5},  // elsewhere on the device
                                      {30, at(2005), 5},  // elsewhere in the buffer
                                      {35, at(2010), 7}};
  const auto merged = merge_adjacent(pieces);
  ASSERT_EQ(merged.size(), 3U);
  EXPECT_EQ(merged[0].nbytes, 15U);
  EXPECT_EQ(merged[1].device_address, at(2000));
  EXPECT_EQ(merged[2].buffer_offset, 30U);
  EXPECT_EQ(merged[2].nbytes, 12U);
}

TEST(CudaPieces, OfNothingAreNoCopies) {
  EXPECT_TRUE(merge_adjacent({}).empty());
  const CopyPiece empty{5, at(5), 0};
  EXPECT_TRUE(merge_adjacent({&empty, 1}).empty());
}

}  // namespace
}  // namespace tensorizer::device::cuda::tests
