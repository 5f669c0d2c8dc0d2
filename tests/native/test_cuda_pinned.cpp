// The pinned memory of a process: made once, shared, given back on request and when idle.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <set>

#include "device_harness.h"

namespace tensorizer::device::cuda::tests {
namespace {

using namespace std::chrono_literals;

using CudaPinned = FakeDriverTest;

TEST_F(CudaPinned, IsPinnedOnceAndSharedByLoadsOfADevice) {
  const Bytes source = random_bytes(400'000, 5);
  DeviceMemory first(source.size());
  DeviceMemory second(source.size());
  {
    CudaCopyEngine one(options());
    CudaCopyEngine two(options());
    EXPECT_EQ(Device::get(0).status().users, 2U);
    std::jthread other(
        [&] { load(two, source, plan(second.data(), source.size(), two.buffer_nbytes(), 999)); });
    load(one, source, plan(first.data(), source.size(), one.buffer_nbytes(), 999));
  }
  EXPECT_TRUE(same(first.bytes(), source));
  EXPECT_TRUE(same(second.bytes(), source));
  {
    const CudaCopyEngine later(options());
  }
  EXPECT_EQ(fake().calls("cuMemHostRegister"), 1U);
  EXPECT_EQ(Device::get(0).status().users, 0U);
}

TEST_F(CudaPinned, EveryDeviceHasItsOwn) {
  const Bytes source = random_bytes(200'000, 6);
  DeviceMemory first(source.size(), 0);
  DeviceMemory second(source.size(), 1);
  CudaCopyEngine zero(options(nullptr, 0));
  CudaCopyEngine one(options(nullptr, 1));
  load(zero, source, plan(first.data(), source.size(), zero.buffer_nbytes(), 1 << 20));
  load(one, source, plan(second.data(), source.size(), one.buffer_nbytes(), 1 << 20));
  EXPECT_TRUE(same(first.bytes(), source));
  EXPECT_TRUE(same(second.bytes(), source));
  EXPECT_EQ(fake().calls("cuMemHostRegister"), 2U);
}

TEST_F(CudaPinned, BuffersOfASecretCopierAreWipedBeforeOthersGetThem) {
  CudaCopyEngine engine(options());
  DeviceMemory target(1000);
  for (const bool secret : {false, true}) {
    std::byte* filled = nullptr;
    {
      const auto copier = engine.make_copier(secret);
      const std::span<std::byte> buffer = copier->try_acquire();
      std::fill_n(buffer.begin(), 1000, std::byte{0xAB});
      filled = buffer.data();
      const CopyPiece piece{0, target.data(), 1000};
      copier->send({&piece, 1}, {});
      copier->finish({});
    }
    const auto next = engine.make_copier(false);
    const std::span<std::byte> buffer = next->try_acquire();
    ASSERT_EQ(buffer.data(), filled) << "the last one returned goes out first";
    EXPECT_EQ(buffer[999], secret ? std::byte{0} : std::byte{0xAB});
    EXPECT_EQ(target.bytes()[999], std::byte{0xAB});
  }
}

TEST_F(CudaPinned, GoesBackOnRequestOnceNobodyUsesIt) {
  {
    const CudaCopyEngine engine(options());
    EXPECT_FALSE(release_pinned(0));
    EXPECT_TRUE(Device::get(0).status().present);
  }
  EXPECT_FALSE(Device::get(0).status().present);
  EXPECT_STREQ(fake().leaks(), "");
}

TEST_F(CudaPinned, GoesBackWhenIdleButNotBeforeItsTime) {
  CudaCopyOptions brief = options();
  brief.pinned.keep_idle = 1500ms;
  {
    const CudaCopyEngine engine(brief);
  }
  EXPECT_TRUE(Device::get(0).status().present);
  for (int i = 0; i < 10; ++i) {  // used again and again: it stays
    std::this_thread::sleep_for(10ms);
    const CudaCopyEngine engine(brief);
  }
  EXPECT_EQ(fake().calls("cuMemHostRegister"), 1U);
  const auto patience = std::chrono::steady_clock::now() + 30s;
  while (Device::get(0).status().present && std::chrono::steady_clock::now() < patience)
    std::this_thread::sleep_for(10ms);
  EXPECT_STREQ(fake().leaks(), "");
}

TEST_F(CudaPinned, OfNoIdleTimeGoesBackAtOnce) {
  CudaCopyOptions once = options();
  once.pinned.keep_idle = 0ms;
  {
    const CudaCopyEngine engine(once);
  }
  EXPECT_STREQ(fake().leaks(), "");
}

// --- growth --------------------------------------------------------------------------------------

CudaCopyOptions ring_of(unsigned slots) {
  CudaCopyOptions large = options();
  large.pinned = {slots, 8 << 20, 60'000ms};
  return large;
}

TEST_F(CudaPinned, ASmallLoadPinsSixteenMebibytesOfWhatItMay) {
  const Bytes source = random_bytes(8 << 20, 5);
  DeviceMemory memory(source.size());
  CudaCopyEngine engine(ring_of(16));
  load(engine, source, plan(memory.data(), source.size(), engine.buffer_nbytes(), 1 << 20), 1);
  EXPECT_TRUE(same(memory.bytes(), source));
  EXPECT_EQ(Device::get(0).status().slots, 2U);
  EXPECT_EQ(fake().calls("cuMemHostRegister"), 1U);
}

TEST_F(CudaPinned, ALoadThatNeedsMoreGetsItUpToTheSizeAskedFor) {
  CudaCopyEngine engine(ring_of(5));
  std::vector<std::unique_ptr<Copier>> copiers;
  std::set<std::byte*> buffers;
  for (unsigned i = 0; i < 3; ++i) {
    copiers.push_back(engine.make_copier(false));
    for (auto buffer = copiers.back()->try_acquire(); !buffer.empty();
         buffer = copiers.back()->try_acquire()) {
      EXPECT_EQ(buffer.size(), 8U << 20);
      EXPECT_TRUE(buffers.insert(buffer.data()).second) << "a buffer has one owner";
    }
  }
  EXPECT_EQ(buffers.size(), 5U);
  EXPECT_EQ(Device::get(0).status().slots, 5U);
  EXPECT_EQ(fake().calls("cuMemHostRegister"), 3U);
}

// Copies of a load that comes later wait behind no more than these.
TEST_F(CudaPinned, OneWorkerHasThreeBuffersAtMost) {
  CudaCopyEngine engine(ring_of(16));
  const auto copier = engine.make_copier(false);
  unsigned count = 0;
  while (!copier->try_acquire().empty()) ++count;
  EXPECT_EQ(count, 3U);
}

TEST_F(CudaPinned, WhereOneBlockIsRefusedTheLoadGoesOnWithWhatThereIs) {
  const Bytes source = random_bytes(50 << 20, 5);
  DeviceMemory memory(source.size());
  CudaCopyEngine engine(ring_of(16));
  fake().set_delay(1000, 3000);
  fake().fail("cuMemHostRegister:1:2");
  load(engine, source, plan(memory.data(), source.size(), engine.buffer_nbytes(), 8 << 20), 1);
  EXPECT_TRUE(same(memory.bytes(), source));
  EXPECT_EQ(Device::get(0).status().slots, 2U);
  EXPECT_NE(engine.shortage().find("only 16 MiB of 128 MiB"), std::string::npos)
      << engine.shortage();
}

TEST_F(CudaPinned, BlocksOfADriverThatRegistersNothingAreItsOwnMemory) {
  fake().fail("cuMemHostRegister:1:801");
  CudaCopyEngine engine(ring_of(6));
  const auto one = engine.make_copier(false), other = engine.make_copier(false);
  while (!one->try_acquire().empty() || !other->try_acquire().empty()) {
  }
  EXPECT_EQ(Device::get(0).status().slots, 6U);
  EXPECT_EQ(fake().calls("cuMemHostRegister"), 1U);
  EXPECT_EQ(fake().calls("cuMemHostAlloc"), 3U);
}

TEST_F(CudaPinned, HasTheSizeAskedForUnlessItIsInUse) {
  CudaCopyOptions larger = options();
  larger.pinned.slots = 6;
  larger.pinned.slot_nbytes = 100'001;
  {
    const CudaCopyEngine first(options());
    const CudaCopyEngine second(larger);
    EXPECT_EQ(second.buffer_nbytes(), kFewBuffers.slot_nbytes);
  }
  const CudaCopyEngine third(larger);
  EXPECT_EQ(third.buffer_nbytes(), 25 * 4096U);  // whole pages
  EXPECT_EQ(Device::get(0).status().slots, 6U);
}

TEST_F(CudaPinned, OfASenselessSizeIsRefused) {
  for (const auto& [slots, nbytes] : std::vector<std::pair<unsigned, uint64_t>>{
           {0, 1 << 20}, {1, 1 << 20}, {5000, 1 << 20}, {4, 0}, {4, 100}, {4, UINT64_MAX}}) {
    CudaCopyOptions wrong = options();
    wrong.pinned.slots = slots;
    wrong.pinned.slot_nbytes = nbytes;
    EXPECT_EQ(code_of([&] { const CudaCopyEngine engine(wrong); }), Errc::invalid_argument);
  }
}

TEST_F(CudaPinned, ADeviceThatDoesNotExistIsAnErrorThatCountsThem) {
  for (const int ordinal : {-1, 2, 99}) {
    try {
      const CudaCopyEngine engine(options(nullptr, ordinal));
      ADD_FAILURE() << ordinal;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Errc::device);
      EXPECT_NE(std::string(error.what()).find("one of the 2 devices"), std::string::npos)
          << error.what();
    }
  }
}

TEST_F(CudaPinned, BuffersThatNothingWasSentFromGoBack) {
  CudaCopyEngine engine(options());
  for (unsigned i = 0; i < 3 * kFewBuffers.slots; ++i)
    EXPECT_FALSE(engine.make_copier(false)->try_acquire().empty());
  EXPECT_EQ(Device::get(0).status().free_slots, kFewBuffers.slots);
}

TEST_F(CudaPinned, ManySmallLoadsShareStreamsAndEvents) {
  const Bytes source = random_bytes(1000, 9);
  DeviceMemory memory(source.size());
  for (int i = 0; i < 20; ++i) {
    CudaCopyEngine engine(options());
    load(engine, source, plan(memory.data(), source.size(), engine.buffer_nbytes(), 1 << 20), 1);
  }
  EXPECT_EQ(fake().calls("cuStreamCreate"), 4U);
  EXPECT_EQ(fake().calls("cuEventCreate"), kFewBuffers.slots + 1);
  EXPECT_TRUE(same(memory.bytes(), source));
}

TEST_F(CudaPinned, ALoadThatComesLaterGetsABufferOfOneThatHasThemAll) {
  CudaCopyEngine first(options()), second(options());
  std::vector<std::unique_ptr<Copier>> greedy;
  for (unsigned i = 0; i < 2; ++i) {
    greedy.push_back(first.make_copier(false));
    while (!greedy.back()->try_acquire().empty()) {
    }
  }
  std::atomic<bool> served{false};
  std::jthread late([&] {
    const auto copier = second.make_copier(false);
    static_cast<void>(next_buffer(*copier, {}, [] {}));
    served = true;
  });
  while (!served) {  // goes on as a load does, one buffer after another
    if (greedy.front()->try_acquire().empty()) greedy.front()->wait({});
    std::this_thread::yield();
  }
}

TEST_F(CudaPinned, ShutDownCancelsLoadsAndReturnsWhenTheirCopiesHaveEnded) {
  fake().set_delay(1000, 3000);
  const Bytes source = random_bytes(3'000'000, 10);
  DeviceMemory memory(source.size());
  CudaCopyEngine engine(options());
  std::jthread loader([&] {
    EXPECT_EQ(code_of([&] {
                load(engine, source,
                     plan(memory.data(), source.size(), engine.buffer_nbytes(), 9999));
              }),
              Errc::cancelled);
  });
  while (fake().calls("cuMemcpyBatchAsync") + fake().calls("cuMemcpyHtoDAsync") == 0)
    std::this_thread::yield();
  shut_down();
  EXPECT_EQ(Device::get(0).status().free_slots, kFewBuffers.slots);
}

#if !defined(TENSORIZER_TSAN)  // which does not support threads in a child of a threaded process
TEST_F(CudaPinned, AForkedChildGetsAnErrorAndLeavesTheParentAlone) {
  auto engine = std::make_unique<CudaCopyEngine>(options());
  const pid_t child = ::fork();
  if (child == 0) {
    const bool refused = code_of([&] { const CudaCopyEngine other(options()); }) == Errc::device &&
                         code_of([&] { engine->order_after_caller(); }) == Errc::device;
    shut_down();
    engine.reset();
    ::_exit(refused && !::testing::Test::HasFailure() ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  const Bytes source = random_bytes(100'000, 8);
  DeviceMemory memory(source.size());
  load(*engine, source, plan(memory.data(), source.size(), engine->buffer_nbytes(), 1 << 20));
  EXPECT_TRUE(same(memory.bytes(), source));
}
#endif

}  // namespace
}  // namespace tensorizer::device::cuda::tests
