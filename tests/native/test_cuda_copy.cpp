// What CudaCopyEngine promises, on the fake driver, which also watches that CUDA's rules are kept.
#include <gtest/gtest.h>

#include "device_harness.h"

namespace tensorizer::device::cuda::tests {
namespace {

using CudaCopy = FakeDriverTest;

[[maybe_unused]] const auto* const process =
    ::testing::AddGlobalTestEnvironment(new FakeDriverProcess);

TEST_F(CudaCopy, BytesOfEverySizeArriveAtTheirAddresses) {
  for (const uint64_t nbytes : {1ULL, 4095ULL, 65'536ULL, 65'537ULL, 1'000'003ULL}) {
    const Bytes source = random_bytes(nbytes, 1);
    DeviceMemory memory(nbytes);
    CudaCopyEngine engine(options());
    load(engine, source, plan(memory.data(), nbytes, engine.buffer_nbytes(), 1 << 20));
    EXPECT_TRUE(same(memory.bytes(), source)) << nbytes;
  }
}

TEST_F(CudaCopy, TwentyThousandSmallPiecesArriveInFewCalls) {
  constexpr uint64_t kPiece = 37;
  constexpr uint64_t kStride = 41;  // gaps keep the pieces apart: nothing can be merged
  constexpr uint64_t kCount = 20'000;
  DeviceMemory memory(kCount * kStride);
  CudaCopyEngine engine(options());
  const uint64_t per_slot = engine.buffer_nbytes() / kPiece;
  std::vector<Unit> units;
  for (uint64_t i = 0; i < kCount; ++i) {
    if (i % per_slot == 0) units.push_back({i * kPiece, {}});
    units.back().pieces.push_back({i % per_slot * kPiece, memory.data() + i * kStride, kPiece});
  }
  const Bytes source = random_bytes(kCount * kPiece, 2);
  load(engine, source, units);
  const Bytes found = memory.bytes();
  for (uint64_t i = 0; i < kCount; ++i)
    ASSERT_TRUE(std::equal(&source[i * kPiece], &source[i * kPiece] + kPiece, &found[i * kStride]))
        << i;
  if (driver().cuMemcpyBatchAsync) {
    EXPECT_EQ(fake().calls("cuMemcpyHtoDAsync"), 0U);
    EXPECT_EQ(fake().calls("cuMemcpyBatchAsync"), units.size());
  } else {
    EXPECT_EQ(fake().calls("cuMemcpyHtoDAsync"), kCount);
  }
}

TEST_F(CudaCopy, SavedBytesAreThoseOfTheDevice) {
  for (const uint64_t piece : {777ULL, 1ULL << 20}) {
    const Bytes source = random_bytes(1'000'003, 3);
    DeviceMemory memory(source.size());
    memory.fill(source);
    CudaCopyEngine engine(options());
    EXPECT_EQ(save(engine, source.size(),
                   plan(memory.data(), source.size(), engine.buffer_nbytes(), piece)),
              source);
  }
}

}  // namespace
}  // namespace tensorizer::device::cuda::tests
