// The pinned memory of a process: made once, shared, given back on request and when idle.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>

#include "device_harness.h"

namespace tensorizer::device::cuda::tests {
namespace {

using namespace std::chrono_literals;

using CudaRing = FakeDriverTest;

TEST_F(CudaRing, IsPinnedOnceAndSharedByLoadsOfADevice) {
  const Bytes source = random_bytes(400'000, 5);
  DeviceMemory first(source.size());
  DeviceMemory second(source.size());
  {
    CudaCopyEngine one(options());
    CudaCopyEngine two(options());
    EXPECT_EQ(Device::get(0).status().users, 2U);
    std::jthread other(
        [&] { load(two, source, plan(second.data(), source.size(), two.slot_nbytes(), 999)); });
    load(one, source, plan(first.data(), source.size(), one.slot_nbytes(), 999));
  }
  EXPECT_EQ(first.bytes(), source);
  EXPECT_EQ(second.bytes(), source);
  { const CudaCopyEngine later(options()); }
  EXPECT_EQ(fake().calls("cuMemHostRegister"), 1U);
  EXPECT_EQ(Device::get(0).status().users, 0U);
}

TEST_F(CudaRing, EveryDeviceHasItsOwn) {
  const Bytes source = random_bytes(200'000, 6);
  DeviceMemory first(source.size(), 0);
  DeviceMemory second(source.size(), 1);
  CudaCopyEngine zero(options(nullptr, 0));
  CudaCopyEngine one(options(nullptr, 1));
  load(zero, source, plan(first.data(), source.size(), zero.slot_nbytes(), 1 << 20));
  load(one, source, plan(second.data(), source.size(), one.slot_nbytes(), 1 << 20));
  EXPECT_EQ(first.bytes(), source);
  EXPECT_EQ(second.bytes(), source);
  EXPECT_EQ(fake().calls("cuMemHostRegister"), 2U);
}

TEST_F(CudaRing, GoesBackOnRequestOnceNobodyUsesIt) {
  {
    const CudaCopyEngine engine(options());
    EXPECT_FALSE(release_ring(0));
    EXPECT_TRUE(Device::get(0).status().present);
  }
  EXPECT_FALSE(Device::get(0).status().present);
  EXPECT_STREQ(fake().leaks(), "");
}

TEST_F(CudaRing, GoesBackWhenIdleButNotBeforeItsTime) {
  CudaCopyOptions brief = options();
  brief.ring.keep_idle = 80ms;
  { const CudaCopyEngine engine(brief); }
  EXPECT_TRUE(Device::get(0).status().present);
  for (int i = 0; i < 10; ++i) {  // used again and again: it stays
    std::this_thread::sleep_for(10ms);
    const CudaCopyEngine engine(brief);
  }
  EXPECT_EQ(fake().calls("cuMemHostRegister"), 1U);
  const auto patience = std::chrono::steady_clock::now() + 10s;
  while (Device::get(0).status().present && std::chrono::steady_clock::now() < patience)
    std::this_thread::sleep_for(10ms);
  EXPECT_STREQ(fake().leaks(), "");
}

TEST_F(CudaRing, OfNoIdleTimeGoesBackAtOnce) {
  CudaCopyOptions once = options();
  once.ring.keep_idle = 0ms;
  { const CudaCopyEngine engine(once); }
  EXPECT_STREQ(fake().leaks(), "");
}

TEST_F(CudaRing, HasTheSizeAskedForUnlessItIsInUse) {
  CudaCopyOptions larger = options();
  larger.ring.slots = 6;
  larger.ring.slot_nbytes = 100'001;
  {
    const CudaCopyEngine first(options());
    const CudaCopyEngine second(larger);
    EXPECT_EQ(second.slot_nbytes(), kSmallRing.slot_nbytes);
  }
  const CudaCopyEngine third(larger);
  EXPECT_EQ(third.slot_nbytes(), 25 * 4096U);  // whole pages
  EXPECT_EQ(Device::get(0).status().slots, 6U);
}

TEST_F(CudaRing, OfASenselessSizeIsRefused) {
  for (const auto& [slots, nbytes] : std::vector<std::pair<unsigned, uint64_t>>{
           {0, 1 << 20}, {1, 1 << 20}, {5000, 1 << 20}, {4, 0}, {4, 100}, {4, UINT64_MAX}}) {
    CudaCopyOptions wrong = options();
    wrong.ring.slots = slots;
    wrong.ring.slot_nbytes = nbytes;
    EXPECT_EQ(code_of([&] { const CudaCopyEngine engine(wrong); }), Errc::invalid_argument);
  }
}

TEST_F(CudaRing, ADeviceThatDoesNotExistIsAnErrorThatCountsThem) {
  for (const int ordinal : {-1, 2, 99}) {
    try {
      const CudaCopyEngine engine(options(nullptr, ordinal));
      ADD_FAILURE() << ordinal;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Errc::device);
      EXPECT_NE(std::string(error.what()).find("found 2"), std::string::npos) << error.what();
    }
  }
}

TEST_F(CudaRing, LeasesThatDieUnsubmittedGoBack) {
  CudaCopyEngine engine(options());
  for (unsigned i = 0; i < 3 * kSmallRing.slots; ++i) static_cast<void>(engine.acquire({}));
  EXPECT_EQ(Device::get(0).status().free_slots, kSmallRing.slots);
}

TEST_F(CudaRing, ShutDownCancelsLoadsAndReturnsWhenTheirCopiesHaveEnded) {
  fake().set_delay(1000, 3000);
  DeviceMemory memory(60'000);
  CudaCopyEngine engine(options());
  const CopyPiece piece{0, memory.data(), 60'000};
  engine.submit(engine.acquire({}), {&piece, 1});
  shut_down();
  EXPECT_EQ(Device::get(0).status().free_slots, kSmallRing.slots);
  EXPECT_EQ(code_of([&] { engine.drain(); }), Errc::cancelled);
}

#if !defined( \
    __SANITIZE_THREAD__)  // which does not support threads in a child of a threaded process
TEST_F(CudaRing, AForkedChildGetsAnErrorAndLeavesTheParentAlone) {
  auto engine = std::make_unique<CudaCopyEngine>(options());
  const pid_t child = ::fork();
  if (child == 0) {
    const bool refused = code_of([&] { const CudaCopyEngine other(options()); }) == Errc::device &&
                         code_of([&] { static_cast<void>(engine->acquire({})); }) == Errc::device;
    shut_down();
    engine.reset();
    ::_exit(refused && !::testing::Test::HasFailure() ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  const Bytes source = random_bytes(100'000, 8);
  DeviceMemory memory(source.size());
  load(*engine, source, plan(memory.data(), source.size(), engine->slot_nbytes(), 1 << 20));
  EXPECT_EQ(memory.bytes(), source);
}
#endif

}  // namespace
}  // namespace tensorizer::device::cuda::tests
