// Pure parts of the CUDA engine: which pieces become one copy, and what the scatter kernel does,
// thread by thread.
#include <gtest/gtest.h>

#include <cstring>

#include "device/cuda/copy_stream.h"
#include "device_harness.h"

// The kernel's own source, compiled for the host: its threads run one after the other, which gives
// the same bytes because they share nothing.
namespace kernel_on_host {
struct Index {
  unsigned x;
};
thread_local Index threadIdx{}, blockIdx{}, blockDim{}, gridDim{};
struct uint4 {
  unsigned x, y, z, w;
};
}  // namespace kernel_on_host
#define __device__
#define __global__
using kernel_on_host::blockDim;
using kernel_on_host::blockIdx;
using kernel_on_host::gridDim;
using kernel_on_host::threadIdx;
using kernel_on_host::uint4;
#include "device/cuda/kernels/scatter.cu"
#undef __device__
#undef __global__

namespace tensorizer::device::cuda::tests {
namespace {

std::byte* at(uintptr_t address) { return reinterpret_cast<std::byte*>(address); }

TEST(CudaPieces, ThatContinueEachOtherOnBothSidesBecomeOneCopy) {
  const std::vector<CopyPiece> pieces{{0, at(1000), 10}, {10, at(1010), 0},
                                      {10, at(1010), 5},  // one
                                      {15, at(2000), 5},  // elsewhere on the device
                                      {30, at(2005), 5},  // elsewhere in the slot
                                      {35, at(2010), 7}};
  const auto merged = merge_adjacent(pieces);
  ASSERT_EQ(merged.size(), 3U);
  EXPECT_EQ(merged[0].nbytes, 15U);
  EXPECT_EQ(merged[1].device_address, at(2000));
  EXPECT_EQ(merged[2].slot_offset, 30U);
  EXPECT_EQ(merged[2].nbytes, 12U);
}

TEST(CudaPieces, OfNothingAreNoCopies) {
  EXPECT_TRUE(merge_adjacent({}).empty());
  const CopyPiece empty{5, at(5), 0};
  EXPECT_TRUE(merge_adjacent({&empty, 1}).empty());
}

void run_kernel(const std::vector<ScatterPiece>& pieces, const Bytes& slot, unsigned blocks) {
  const auto* bytes = reinterpret_cast<const unsigned char*>(slot.data());
  gridDim.x = blocks;
  blockDim.x = kScatterThreads;
  for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
    for (threadIdx.x = 0; threadIdx.x < kScatterThreads; ++threadIdx.x)
      tensorizer_scatter(pieces.data(), static_cast<uint32_t>(pieces.size()), bytes);
}

TEST(CudaPieces, TheScatterKernelGivesTheBytesOfItsTwinAtEveryAlignment) {
  const Bytes slot = random_bytes(1 << 16, 21);
  for (uint64_t source_skew = 0; source_skew < 17; ++source_skew) {
    Bytes by_kernel(1 << 16);
    Bytes by_twin(1 << 16);
    std::vector<ScatterPiece> for_kernel;
    std::vector<ScatterPiece> for_twin;
    uint64_t to = 0;
    for (uint64_t i = 0; i < 60; ++i) {
      const uint64_t nbytes = i * i / 3;
      const uint64_t from = source_skew + i * 800;
      to += i % 19;
      for_kernel.push_back({from, reinterpret_cast<uint64_t>(by_kernel.data() + to), nbytes});
      for_twin.push_back({from, reinterpret_cast<uint64_t>(by_twin.data() + to), nbytes});
      to += nbytes;
    }
    ASSERT_LE(to, by_kernel.size());
    run_kernel(for_kernel, slot, 7);
    scatter_on_host(for_twin.data(), static_cast<uint32_t>(for_twin.size()), slot.data());
    ASSERT_EQ(by_kernel, by_twin) << source_skew;
  }
}

class CudaScatter : public FakeDriverTest {};

TEST_F(CudaScatter, SmallPiecesGoThroughTheKernelAndLargeOnesDoNot) {
  CudaCopyOptions with_kernel = options();
  with_kernel.scatter_kernel = true;
  with_kernel.ring.slot_nbytes = 256 << 10;
  if (!has_kernels()) {
    EXPECT_EQ(code_of([&] { const CudaCopyEngine engine(with_kernel); }), Errc::device);
    GTEST_SKIP() << "built without nvcc: there are no kernels";
  }
  constexpr uint64_t kSmall = 333;
  constexpr uint64_t kCount = 200;
  constexpr uint64_t kLarge = 100'000;
  DeviceMemory memory(kCount * (kSmall + 3) + kLarge);
  Unit unit{0, {}};
  for (uint64_t i = 0; i < kCount; ++i)
    unit.pieces.push_back({i * kSmall, memory.data() + i * (kSmall + 3), kSmall});
  unit.pieces.push_back({kCount * kSmall, memory.data() + kCount * (kSmall + 3), kLarge});
  const Bytes source = random_bytes(kCount * kSmall + kLarge, 22);
  {
    CudaCopyEngine engine(with_kernel);
    load(engine, source, {unit}, 1);
  }
  const Bytes found = memory.bytes();
  for (const CopyPiece& piece : unit.pieces)
    ASSERT_TRUE(std::equal(&source[piece.slot_offset], &source[piece.slot_offset] + piece.nbytes,
                           &found[static_cast<size_t>(piece.device_address - memory.data())]));
  EXPECT_EQ(fake().calls("cuLaunchKernel"), 1U);
  EXPECT_EQ(fake().calls("cuMemcpyHtoDAsync"), 1U);
}

}  // namespace
}  // namespace tensorizer::device::cuda::tests
