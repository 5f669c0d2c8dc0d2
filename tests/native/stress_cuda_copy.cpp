// Loads, saves, stops and failures at once, on two devices that share nothing and pinned memory
// that is shared by all, with copies that take random times. Meant for ThreadSanitizer; the fake
// driver checks the order on the device.
#include <gtest/gtest.h>

#include "device_harness.h"

namespace tensorizer::device::cuda::tests {
namespace {

class CudaStress : public FakeDriverTest {
 protected:
  void run_loads(unsigned seed, int device, unsigned rounds) {
    std::mt19937 random(seed);
    for (unsigned round = 0; round < rounds; ++round) {
      const Bytes source = random_bytes(1 + random() % 500'000, seed + round);
      void* stream = fake().make_stream(device);
      {
        DeviceMemory memory(source.size(), device, stream);
        CudaCopyEngine engine(options(stream, device));
        auto units =
            plan(memory.data(), source.size(), engine.buffer_nbytes(), 1 + random() % 9000);
        for (Unit& unit : units) std::shuffle(unit.pieces.begin(), unit.pieces.end(), random);
        fake().compute(stream, device, memory.data(), source.size(), 1,
                       static_cast<unsigned>(random() % 500));
        engine.order_after_caller();
        load(engine, source, units);
        EXPECT_EQ(save(engine, source.size(), units), source);
        EXPECT_TRUE(same(memory.bytes(), source));
        fake().compute(stream, device, memory.data(), source.size(), 2, 0);
      }
      fake().wait(stream, device);
      fake().destroy_stream(stream);
    }
  }

  // Starts loads and gives up on them at random moments, in all the ways there are.
  void run_quitters(unsigned seed, int device, unsigned rounds) {
    std::mt19937 random(seed);
    const Bytes source = random_bytes(400'000, seed);
    for (unsigned round = 0; round < rounds; ++round) {
      DeviceMemory memory(source.size(), device);
      CudaCopyEngine engine(options(nullptr, device));
      const auto units = plan(memory.data(), source.size(), engine.buffer_nbytes(), 7000);
      std::jthread quitter([&, wait = random() % 2000] {
        std::this_thread::sleep_for(std::chrono::microseconds(wait));
        engine.cancel();
      });
      try {
        load(engine, source, units);
        EXPECT_TRUE(same(memory.bytes(), source));
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), Errc::cancelled) << error.what();
      }
    }
  }
};

TEST_F(CudaStress, LoadsSavesAndStopsOfTwoDevicesKeepTheirBytesApart) {
  constexpr unsigned kRounds = 4;
  fake().set_delay(0, 200);
  std::vector<std::jthread> threads;
  for (unsigned i = 0; i < 4; ++i)
    threads.emplace_back([&, i] { run_loads(100 * i, static_cast<int>(i % 2), kRounds); });
  threads.emplace_back([&] { run_quitters(7, 0, 3 * kRounds); });
  threads.emplace_back([&] {
    for (unsigned i = 0; i < 20; ++i) {
      static_cast<void>(release_pinned(static_cast<int>(i % 2)));
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
  });
}

TEST_F(CudaStress, FailuresAtRandomCallsNeverLoseABufferOrTouchFreedMemory) {
  const Bytes source = random_bytes(500'000, 1);
  std::mt19937 random(3);
  const std::vector<std::string> calls{"cuMemcpyHtoDAsync", "cuEventRecord", "cuEventQuery",
                                       "cuStreamCreate", "cuMemcpyBatchAsync"};
  for (int round = 0; round < 25; ++round) {
    fake().reset();
    fake().set_delay(0, 200);
    const std::string& name = calls[random() % calls.size()];
    fake().fail((name + ":" + std::to_string(1 + random() % 12) + ":999").c_str());
    DeviceMemory memory(source.size());
    try {
      CudaCopyEngine engine(options());
      auto units = plan(memory.data(), source.size(), engine.buffer_nbytes(), 20'000);
      for (Unit& unit : units) std::reverse(unit.pieces.begin(), unit.pieces.end());
      load(engine, source, units);
      EXPECT_TRUE(same(memory.bytes(), source));
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Errc::device) << error.what();
    }
    const PinnedStatus status = Device::get(0).status();
    EXPECT_EQ(status.free_slots, status.slots) << name;
  }
}

}  // namespace
}  // namespace tensorizer::device::cuda::tests
