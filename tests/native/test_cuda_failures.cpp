// What happens when the driver fails, the device is lost or somebody stops: nothing of ours touches
// the caller's memory when the error is out, the slots are back, the next load works.
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
  void expect_working_load() {
    DeviceMemory memory(kSource.size());
    CudaCopyEngine engine(options());
    load(engine, kSource, units(memory, engine));
    EXPECT_EQ(memory.bytes(), kSource);
  }
  // Backwards within a slot, so that no two pieces can become one.
  std::vector<Unit> units(const DeviceMemory& memory, const CopyEngine& engine) {
    auto made = plan(memory.data(), kSource.size(), engine.slot_nbytes(), 10'000);
    for (Unit& unit : made) std::reverse(unit.pieces.begin(), unit.pieces.end());
    return made;
  }

  const Bytes kSource = random_bytes(900'001, 7);
};

class CudaFailureOf : public CudaFailure, public ::testing::WithParamInterface<const char*> {};

TEST_P(CudaFailureOf, SurfacesAsADeviceErrorAndTheNextLoadWorks) {
  const std::string name = GetParam();
  for (const char* nth : {"1", "2", "6"}) {
    EXPECT_TRUE(release_ring(0));
    fake().reset();
    fake().set_delay(0, 300);
    fake().fail((name + ":" + nth + ":999").c_str());
    DeviceMemory memory(kSource.size());
    try {
      CudaCopyEngine engine(options());
      load(engine, kSource, plan(memory.data(), kSource.size(), engine.slot_nbytes(), 1 << 20));
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
                                           "cuEventQuery", "cuEventSynchronize",
                                           "cuStreamWaitEvent", "cuStreamIsCapturing",
                                           "cuMemHostRegister", "cuMemcpyHtoDAsync"),
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
    EXPECT_NE(std::string(error.what()).find("CUDA_ERROR_LAUNCH_FAILED"), std::string::npos);
  }
  fake().reset();
  fake().forget_leaks();  // nobody could tell whether the device still used them
  expect_working_load();
}

TEST_F(CudaFailure, MemoryThatCannotBePinnedIsAMemoryErrorThatSaysHowMuch) {
  fake().fail("cuMemHostRegister:1:2");
  try {
    const CudaCopyEngine engine(options());
    FAIL() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Errc::out_of_memory);
    EXPECT_NE(std::string(error.what()).find("bytes of host memory"), std::string::npos);
  }
  expect_working_load();
}

TEST_F(CudaFailure, MemoryThatCannotBeRegisteredIsAllocatedByTheDriver) {
  fake().fail("cuMemHostRegister:1:801");
  expect_working_load();
  EXPECT_EQ(fake().calls("cuMemHostAlloc"), 1U);
}

TEST_F(CudaFailure, AFailingSaveEndsWithTheDriversErrorAndGivesItsSlotsBack) {
  DeviceMemory memory(kSource.size());
  memory.fill(kSource);
  CudaCopyEngine engine(options());
  fake().fail("cuMemcpyDtoHAsync:2:700");
  const auto parts = plan(memory.data(), kSource.size(), engine.slot_nbytes(), 1 << 20);
  EXPECT_EQ(code_of([&] {
              for (const Unit& unit : parts) {
                const SlotLease lease = engine.acquire({});
                engine.fetch(lease, unit.pieces, {});
              }
            }),
            Errc::device);
  EXPECT_EQ(Device::get(0).status().free_slots, kSmallRing.slots);
}

TEST_F(CudaFailure, WhenNobodyCanTellWhetherACopyEndedItsRingIsNeverUsedAgain) {
  // Never freed: it may still be written to.
  static const auto* const memory = new DeviceMemory(kSource.size());
  auto bystander = std::make_unique<CudaCopyEngine>(options());
  {
    CudaCopyEngine engine(options());
    fake().fail("cuEventSynchronize:1:999,cuStreamSynchronize:1:999");
    EXPECT_EQ(code_of([&] { load(engine, kSource, units(*memory, engine), 1); }), Errc::device);
  }
  EXPECT_EQ(code_of([&] { static_cast<void>(bystander->acquire({})); }), Errc::device);
  bystander.reset();
  fake().reset();
  fake().set_delay(0, 0);
  std::this_thread::sleep_for(50ms);  // the copy nobody could wait for
  expect_working_load();
  EXPECT_TRUE(release_ring(0));
  EXPECT_STRNE(fake().leaks(), "");
  fake().forget_leaks();
}

TEST_F(CudaFailure, ABatchThatTheDriverRefusesIsCopiedPieceByPiece) {
  if (!driver().cuMemcpyBatchAsync) GTEST_SKIP() << "this driver has no batched copies";
  for (const char* code : {"801", "1"}) {
    fake().reset();
    fake().fail((std::string("cuMemcpyBatchAsync:1:") + code).c_str());
    expect_working_load();
    EXPECT_EQ(fake().calls("cuMemcpyBatchAsync"), 1U);
    EXPECT_GT(fake().calls("cuMemcpyHtoDAsync"), 80U);
  }
}

TEST_F(CudaFailure, AStopEndsTheWaitForASlot) {
  CudaCopyEngine engine(options());
  std::vector<SlotLease> all;
  for (unsigned i = 0; i < kSmallRing.slots; ++i) all.push_back(engine.acquire({}));
  std::stop_source stop;
  std::jthread stopper([&] {
    std::this_thread::sleep_for(20ms);
    stop.request_stop();
  });
  EXPECT_EQ(code_of([&] { static_cast<void>(engine.acquire(stop.get_token())); }), Errc::cancelled);
}

TEST_F(CudaFailure, AStoppedFetchDoesNotWaitForTheCallersWork) {
  DeviceMemory memory(1000);
  void* stream = fake().make_stream(0);
  fake().compute(stream, 0, memory.data(), 1000, 5, 500'000);
  {
    CudaCopyEngine engine(options(stream));
    std::stop_source stop;
    std::jthread stopper([&] {
      std::this_thread::sleep_for(20ms);
      stop.request_stop();
    });
    const auto began = std::chrono::steady_clock::now();
    const SlotLease lease = engine.acquire({});
    const CopyPiece piece{0, memory.data(), 1000};
    EXPECT_EQ(code_of([&] {
                engine.fetch(lease, {&piece, 1}, stop.get_token());
              }),
              Errc::cancelled);
    EXPECT_LT(std::chrono::steady_clock::now() - began, 300ms);
  }
  fake().wait(stream, 0);
  fake().destroy_stream(stream);
}

TEST_F(CudaFailure, ACancelledLoadDropsWhatHasNotBegunAndTouchesNothing) {
  DeviceMemory memory(4000);
  void* stream = fake().make_stream(0);
  const Bytes before(4000, std::byte{9});
  {
    CudaCopyEngine engine(options(stream));
    fake().compute(stream, 0, memory.data(), 4000, 9, 200'000);
    engine.order_after_caller();
    const CopyPiece piece{0, memory.data(), 4000};
    engine.submit(engine.acquire({}), {&piece, 1});
    engine.cancel();
    EXPECT_EQ(code_of([&] { engine.drain(); }), Errc::cancelled);
    EXPECT_EQ(code_of([&] { static_cast<void>(engine.acquire({})); }), Errc::cancelled);
  }
  fake().wait(stream, 0);
  EXPECT_EQ(memory.bytes(), before);
  fake().destroy_stream(stream);
}

TEST_F(CudaFailure, APieceThatLeavesItsSlotIsRefused) {
  DeviceMemory memory(4096);
  CudaCopyEngine engine(options());
  for (const CopyPiece piece : {CopyPiece{0, memory.data(), engine.slot_nbytes() + 1},
                                CopyPiece{engine.slot_nbytes() + 1, memory.data(), 0},
                                CopyPiece{1, memory.data(), UINT64_MAX}})
    EXPECT_EQ(code_of([&] {
                engine.submit(engine.acquire({}), {&piece, 1});
              }),
              Errc::invalid_argument);
  EXPECT_EQ(Device::get(0).status().free_slots, kSmallRing.slots);
}

TEST_F(CudaFailure, AnEngineThatDiesWithCopiesInFlightWaitsForThem) {
  fake().set_delay(2000, 5000);
  DeviceMemory memory(kSource.size());
  {
    CudaCopyEngine engine(options());
    for (const Unit& unit : units(memory, engine)) {
      if (unit.offset >= 3 * engine.slot_nbytes()) break;
      engine.submit(engine.acquire({}), unit.pieces);
    }
  }
  EXPECT_EQ(Device::get(0).status().free_slots, kSmallRing.slots);
}

}  // namespace
}  // namespace tensorizer::device::cuda::tests
