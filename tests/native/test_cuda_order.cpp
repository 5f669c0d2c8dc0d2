// Who waits for whom: copies after the caller's earlier work, the caller's later work after the
// copies. The fake driver ends the process when two streams touch the same bytes and no event
// orders them, whatever the timing was.
#include <gtest/gtest.h>

#include <chrono>

#include "device_harness.h"

namespace tensorizer::device::cuda::tests {
namespace {

using namespace std::chrono_literals;

class CudaOrder : public FakeDriverTest, public ::testing::WithParamInterface<bool> {
 protected:
  void SetUp() override {
    FakeDriverTest::SetUp();
    stream_ = GetParam() ? nullptr : fake().make_stream(0);
  }
  void TearDown() override {
    if (stream_) fake().destroy_stream(stream_);
    FakeDriverTest::TearDown();
  }

  void* stream_ = nullptr;
  const Bytes kSource = random_bytes(300'000, 11);
};

TEST_P(CudaOrder, ALoadWritesAfterTheCallersEarlierWorkOnTheSameMemory) {
  DeviceMemory memory(kSource.size(), 0, stream_);
  fake().compute(stream_, 0, memory.data(), memory.size(), 1, 30'000);
  CudaCopyEngine engine(options(stream_));
  load(engine, kSource, plan(memory.data(), kSource.size(), engine.buffer_nbytes(), 1 << 20));
  EXPECT_TRUE(same(memory.bytes(), kSource));
}

TEST_P(CudaOrder, MemoryAllocatedAfterTheEngineWasMadeIsOrderedByOrderAfterCaller) {
  CudaCopyEngine engine(options(stream_));
  DeviceMemory memory(kSource.size(), 0, stream_);
  fake().compute(stream_, 0, memory.data(), memory.size(), 1, 30'000);  // its former owner's work
  engine.order_after_caller();
  load(engine, kSource, plan(memory.data(), kSource.size(), engine.buffer_nbytes(), 1 << 20));
  EXPECT_TRUE(same(memory.bytes(), kSource));
}

TEST_P(CudaOrder, WorkEnqueuedAfterALoadSeesTheData) {
  fake().set_delay(0, 2000);
  DeviceMemory memory(kSource.size(), 0, stream_);
  CudaCopyEngine engine(options(stream_));
  load(engine, kSource, plan(memory.data(), kSource.size(), engine.buffer_nbytes(), 1 << 20));
  fake().compute(stream_, 0, memory.data(), memory.size(), -1, 0);
  fake().compute(stream_, 0, memory.data(), memory.size(), 3, 0);
  fake().wait(stream_, 0);
  EXPECT_EQ(memory.bytes(), Bytes(kSource.size(), std::byte{3}));
}

TEST_P(CudaOrder, ASaveReadsAfterTheCallersEarlierWork) {
  DeviceMemory memory(kSource.size(), 0, stream_);
  fake().compute(stream_, 0, memory.data(), memory.size(), 7, 30'000);
  CudaCopyEngine engine(options(stream_));
  EXPECT_EQ(save(engine, kSource.size(),
                 plan(memory.data(), kSource.size(), engine.buffer_nbytes(), 5000)),
            Bytes(kSource.size(), std::byte{7}));
  fake().compute(stream_, 0, memory.data(), memory.size(), 8, 0);  // may change it at once
  fake().wait(stream_, 0);
}

TEST_P(CudaOrder, AnEngineMayBeUsedAgain) {
  CudaCopyEngine engine(options(stream_));
  for (int round = 0; round < 3; ++round) {
    DeviceMemory memory(kSource.size(), 0, stream_);
    fake().compute(stream_, 0, memory.data(), memory.size(), round, 1000);
    engine.order_after_caller();
    load(engine, kSource, plan(memory.data(), kSource.size(), engine.buffer_nbytes(), 1 << 20));
    EXPECT_TRUE(same(memory.bytes(), kSource));
  }
}

TEST_P(CudaOrder, ALoadDoesNotWaitForWorkOfOtherStreams) {
  void* other = fake().make_stream(0);
  auto busy = std::make_unique<DeviceMemory>(1000, 0, other);
  {
    const HeldStream held(other);
    fake().compute(other, 0, busy->data(), 1000, 1, 0);
    DeviceMemory memory(kSource.size(), 0, stream_);
    CudaCopyEngine engine(options(stream_));
    load(engine, kSource, plan(memory.data(), kSource.size(), engine.buffer_nbytes(), 1 << 20));
    EXPECT_TRUE(held.still_held());
  }
  busy.reset();
  fake().wait(other, 0);
  fake().destroy_stream(other);
}

TEST_P(CudaOrder, AStreamThatCapturesAGraphIsRefused) {
  fake().set_capturing(stream_, 0, 1);
  EXPECT_EQ(code_of([&] { const CudaCopyEngine engine(options(stream_)); }),
            Errc::invalid_argument);
  fake().set_capturing(stream_, 0, 0);
}

INSTANTIATE_TEST_SUITE_P(Streams, CudaOrder, ::testing::Bool(), [](const auto& made) {
  return made.param ? "DefaultStream" : "OwnStream";
});

}  // namespace
}  // namespace tensorizer::device::cuda::tests
