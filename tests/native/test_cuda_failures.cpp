// What happens when the driver fails, the device is lost or somebody stops: nothing of ours touches
// the caller's memory when the error is out, the buffers are back, the next load works.
#include <gtest/gtest.h>

#include <chrono>

#include "device_harness.h"

namespace tensorizer::device::cuda::tests {
namespace {

using namespace std::chrono_literals;

class CudaFailure : public FakeDriverTest {
 protected:
  // A load that must fail with `wanted`; its destination is freed at once, which the fake driver
  // checks.
  void expect_failing_load(Errc wanted) {
    DeviceMemory memory(kSource.size());
    EXPECT_EQ(code_of([&] {
                CudaCopyEngine engine(options());
                load(engine, kSource, units(memory, engine));
              }),
              wanted);
  }
  void expect_working_load(unsigned workers = 3) {
    DeviceMemory memory(kSource.size());
    CudaCopyEngine engine(options());
    load(engine, kSource, units(memory, engine), workers);
    EXPECT_TRUE(same(memory.bytes(), kSource));
  }
  // Backwards within a buffer, so that no two pieces can become one.
  std::vector<Unit> units(const DeviceMemory& memory, const CopyEngine& engine) {
    auto made = plan(memory.data(), kSource.size(), engine.buffer_nbytes(), 10'000);
    for (Unit& unit : made) std::reverse(unit.pieces.begin(), unit.pieces.end());
    return made;
  }

  const Bytes kSource = random_bytes(900'001, 7);
};

class CudaFailureOf : public CudaFailure, public ::testing::WithParamInterface<const char*> {};

TEST_P(CudaFailureOf, SurfacesAsADeviceErrorAndTheNextLoadWorks) {
  const std::string name = GetParam();
  for (const char* nth : {"1", "2", "6"}) {
    EXPECT_TRUE(release_pinned(0));
    fake().reset();
    fake().set_delay(0, 300);
    fake().fail((name + ":" + nth + ":999").c_str());
    DeviceMemory memory(kSource.size());
    try {
      CudaCopyEngine engine(options());
      load(engine, kSource, plan(memory.data(), kSource.size(), engine.buffer_nbytes(), 1 << 20));
      EXPECT_LT(fake().calls(name.c_str()), static_cast<unsigned>(std::atoi(nth)));
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Errc::device);
      EXPECT_NE(std::string(error.what()).find("CUDA_ERROR_UNKNOWN (999)"), std::string::npos)
          << error.what();
    }
    fake().reset();
    expect_working_load();
  }
}

INSTANTIATE_TEST_SUITE_P(EveryCall, CudaFailureOf,
                         ::testing::Values("cuDevicePrimaryCtxRetain", "cuCtxPushCurrent",
                                           "cuStreamCreate", "cuEventCreate", "cuEventRecord",
                                           "cuEventQuery", "cuStreamIsCapturing",
                                           "cuMemcpyHtoDAsync"),
                         [](const auto& made) { return std::string(made.param); });

TEST_F(CudaFailure, ALostDeviceEndsTheLoadWithAnErrorThatNamesIt) {
  fake().fail("execute:5:719");
  DeviceMemory memory(kSource.size());
  try {
    CudaCopyEngine engine(options());
    load(engine, kSource, units(memory, engine));
    FAIL() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Errc::device);
    EXPECT_NE(std::string(error.what()).find("CUDA device 0"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("CUDA_ERROR_LAUNCH_FAILED"), std::string::npos)
        << error.what();
  }
  fake().reset();
  fake().forget_leaks();  // nobody could tell whether the device still used them
  expect_working_load();
}

// Any failure at all: systems refuse to pin for reasons of their own.
TEST_F(CudaFailure, MemoryThatCannotBeRegisteredIsAllocatedByTheDriver) {
  for (const char* code : {"1", "2", "304", "801", "999"}) {
    EXPECT_TRUE(release_pinned(0));
    fake().reset();
    fake().fail((std::string("cuMemHostRegister:1:") + code).c_str());
    expect_working_load();
    EXPECT_EQ(fake().calls("cuMemHostAlloc"), 1U);
    EXPECT_EQ(CudaCopyEngine(options()).shortage(), "");
    EXPECT_EQ(Device::get(0).status().slots, kFewBuffers.slots);
  }
}

TEST_F(CudaFailure, WhereLittleCanBePinnedThereAreFewerBuffersAndAWordAboutIt) {
  fake().fail("cuMemHostRegister:1:2,cuMemHostAlloc:1:2");
  expect_working_load();
  EXPECT_EQ(Device::get(0).status().slots, kFewBuffers.slots / 2);
  const CudaCopyEngine engine(options());  // the same settings: nothing is pinned anew
  EXPECT_NE(engine.shortage().find("CUDA_ERROR_OUT_OF_MEMORY"), std::string::npos)
      << engine.shortage();
  EXPECT_EQ(fake().calls("cuMemHostRegister"), 2U);
}

TEST_F(CudaFailure, WhereLittleCanBePinnedBuffersOfManyMebibytesGetSmaller) {
  fake().fail("cuMemHostRegister:1:2,cuMemHostAlloc:1:2,cuMemHostRegister:1:2,cuMemHostAlloc:1:2");
  CudaCopyOptions large = options();
  large.pinned.slots = 2;
  large.pinned.slot_nbytes = 8 << 20;
  const CudaCopyEngine engine(large);
  EXPECT_EQ(engine.buffer_nbytes(), 2U << 20);
}

TEST_F(CudaFailure, WhereNothingCanBePinnedCopiesGoThroughOrdinaryMemory) {
  fake().allow_pageable(1);
  std::string refusals;
  for (int i = 0; i < 9; ++i) refusals += "cuMemHostRegister:1:999,cuMemHostAlloc:1:999,";
  fake().fail(refusals.c_str());
  expect_working_load();
  DeviceMemory memory(kSource.size());
  memory.fill(kSource);
  CudaCopyEngine engine(options());
  EXPECT_NE(engine.shortage().find("cannot be pinned"), std::string::npos) << engine.shortage();
  EXPECT_EQ(save(engine, kSource.size(), units(memory, engine)), kSource);
}

TEST_F(CudaFailure, AFailingSaveEndsWithTheDriversErrorAndGivesItsBuffersBack) {
  DeviceMemory memory(kSource.size());
  memory.fill(kSource);
  CudaCopyEngine engine(options());
  fake().fail("cuMemcpyDtoHAsync:2:700");
  const auto parts = plan(memory.data(), kSource.size(), engine.buffer_nbytes(), 1 << 20);
  EXPECT_EQ(code_of([&] { save(engine, kSource.size(), parts, 1); }), Errc::device);
  EXPECT_EQ(Device::get(0).status().free_slots, kFewBuffers.slots);
}

TEST_F(CudaFailure, WhenNobodyCanTellWhetherACopyEndedItsMemoryIsNeverUsedAgain) {
  // Never freed: it may still be written to.
  static const auto* const memory = new DeviceMemory(kSource.size());
  auto bystander = std::make_unique<CudaCopyEngine>(options());
  auto copier = bystander->make_copier(false);
  {
    CudaCopyEngine engine(options());
    fake().fail("cuEventQuery:3:999,cuStreamSynchronize:1:999");
    EXPECT_EQ(code_of([&] { load(engine, kSource, units(*memory, engine), 1); }), Errc::device);
  }
  try {  // whoever waits for a buffer may be the first to be heard, and says why too
    static_cast<void>(next_buffer(*copier, {}, [] {}));
    FAIL() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Errc::device);
    EXPECT_NE(std::string(error.what()).find("CUDA_ERROR_UNKNOWN (999)"), std::string::npos)
        << error.what();
  }
  copier.reset();
  bystander.reset();
  fake().reset();
  fake().set_delay(0, 0);
  std::this_thread::sleep_for(50ms);  // the copy nobody could wait for
  expect_working_load();
  EXPECT_TRUE(release_pinned(0));
  EXPECT_STRNE(fake().leaks(), "");
  fake().forget_leaks();
}

TEST_F(CudaFailure, ABatchThatTheDriverRefusesIsCopiedPieceByPiece) {
  if (!driver().cuMemcpyBatchAsync) GTEST_SKIP() << "this driver has no batched copies";
  for (const char* code : {"801", "1"}) {
    EXPECT_TRUE(release_pinned(0));
    fake().reset();
    fake().fail((std::string("cuMemcpyBatchAsync:1:") + code).c_str());
    expect_working_load(1);
    EXPECT_EQ(fake().calls("cuMemcpyBatchAsync"), 1U);
    EXPECT_GT(fake().calls("cuMemcpyHtoDAsync"), 80U);
  }
}

// Requests a stop a little later, from another thread.
class SoonStopped {
 public:
  std::stop_token token() const { return stop_.get_token(); }

 private:
  std::stop_source stop_;
  std::jthread stopper_{[this] {
    std::this_thread::sleep_for(20ms);
    stop_.request_stop();
  }};
};

TEST_F(CudaFailure, AStopEndsTheWaitForABuffer) {
  CudaCopyEngine engine(options());
  std::vector<std::unique_ptr<Copier>> copiers;
  for (unsigned i = 0; i < 2; ++i) {
    copiers.push_back(engine.make_copier(false));
    while (!copiers.back()->try_acquire().empty()) {
    }
  }
  const auto copier = engine.make_copier(false);
  const SoonStopped stop;
  EXPECT_EQ(code_of([&] { static_cast<void>(next_buffer(*copier, stop.token(), [] {})); }),
            Errc::cancelled);
}

TEST_F(CudaFailure, AStopEndsTheWaitForWorkOfTheCallerThatNeverEnds) {
  DeviceMemory memory(1000);
  void* stream = fake().make_stream(0);
  {
    const HeldStream held(stream);
    CudaCopyEngine engine(options(stream));
    EXPECT_FALSE(engine.is_ready());
    const SoonStopped stop;
    const auto copier = engine.make_copier(false);
    static_cast<void>(copier->try_acquire());
    const CopyPiece piece{0, memory.data(), 1000};
    EXPECT_EQ(code_of([&] { copier->send({&piece, 1}, stop.token()); }), Errc::cancelled);
    EXPECT_TRUE(held.still_held());
  }
  fake().wait(stream, 0);
  fake().destroy_stream(stream);
}

TEST_F(CudaFailure, CopiesOfACopierDoNotWaitForWorkThatTheCallerEnqueuedSince) {
  DeviceMemory memory(kSource.size());
  void* stream = fake().make_stream(0);
  CudaCopyEngine engine(options(stream));
  fake().hold(stream, 0);
  load(engine, kSource, units(memory, engine));
  fake().let_go();
  fake().wait(stream, 0);
  EXPECT_TRUE(same(memory.bytes(), kSource));
  fake().destroy_stream(stream);
}

TEST_F(CudaFailure, ACancelledEngineEndsEveryWaitAndTouchesNothing) {
  DeviceMemory memory(4000);
  void* stream = fake().make_stream(0);
  const Bytes before(4000, std::byte{9});
  {
    CudaCopyEngine engine(options(stream));
    fake().compute(stream, 0, memory.data(), 4000, 9, 50'000);
    engine.order_after_caller();
    const auto copier = engine.make_copier(false);
    static_cast<void>(copier->try_acquire());
    engine.cancel();
    const CopyPiece piece{0, memory.data(), 4000};
    EXPECT_EQ(code_of([&] { copier->send({&piece, 1}, {}); }), Errc::cancelled);
  }
  fake().wait(stream, 0);
  EXPECT_TRUE(same(memory.bytes(), before));
  fake().destroy_stream(stream);
}

TEST_F(CudaFailure, APieceThatLeavesItsBufferIsRefused) {
  DeviceMemory memory(4096);
  CudaCopyEngine engine(options());
  for (const CopyPiece piece : {CopyPiece{0, memory.data(), engine.buffer_nbytes() + 1},
                                CopyPiece{engine.buffer_nbytes() + 1, memory.data(), 0},
                                CopyPiece{1, memory.data(), UINT64_MAX}}) {
    const auto copier = engine.make_copier(false);
    static_cast<void>(copier->try_acquire());
    EXPECT_EQ(code_of([&] { copier->send({&piece, 1}, {}); }), Errc::invalid_argument);
  }
  EXPECT_EQ(Device::get(0).status().free_slots, kFewBuffers.slots);
}

TEST_F(CudaFailure, ACopierThatDiesWithCopiesInFlightWaitsForThem) {
  fake().set_delay(2000, 5000);
  DeviceMemory memory(kSource.size());
  CudaCopyEngine engine(options());
  {
    const auto copier = engine.make_copier(false);
    for (const Unit& unit : units(memory, engine)) {
      if (copier->try_acquire().empty()) break;
      copier->send(unit.pieces, {});
    }
  }
  EXPECT_EQ(Device::get(0).status().free_slots, kFewBuffers.slots);
}

}  // namespace
}  // namespace tensorizer::device::cuda::tests
