// Many threads, small units, random failures: for the thread and address sanitizers.
#include <random>

#include "core/run_units.h"
#include "session_harness.h"

namespace tensorizer::tests {
namespace {

std::vector<size_t> random_sizes(std::mt19937& random) {
  std::vector<size_t> sizes(1 + random() % 60);
  for (size_t& size : sizes) size = random() % 5 == 0 ? random() % 700'000 : random() % 3000;
  return sizes;
}

// The file of one round; every third one is encrypted.
struct RandomFile {
  RandomFile(std::mt19937& random, int round)
      : tensors(make_tensors(random_sizes(random), static_cast<uint64_t>(round))),
        encrypted(round % 3 == 0) {
    save::SaveOptions options;
    if (encrypted) options = {.hashes = {false, true}, .key = test_key()};
    bytes = save_all(tensors, options);
  }

  std::vector<Tensor> tensors;
  bool encrypted;
  Bytes bytes;
};

TEST(Stress, LoadsOfRandomTensorsWithSmallUnitsAndRandomFailures) {
  std::mt19937 random(1);
  for (int round = 0; round < 30; ++round) {
    const RandomFile made(random, round);
    const auto& tensors = made.tensors;
    PlainSource source(made.bytes);
    source.settings = {.concurrency = 6, .unit_nbytes = 64 << 10, .gap_nbytes = 4096};
    HostEngine engine(2 + round % 3, 2 << 20);
    LoadSettings settings{.verify = round % 2 == 0};
    if (made.encrypted) settings.keys = std::make_shared<load::KeyRing>(test_key());
    if (round % 4 == 1) settings.engine = &engine;
    if (round % 5 == 4) source.fail_at = static_cast<int>(random() % 20);
    std::vector<Bytes> found;
    try {
      load_all(source, settings, found);
      for (size_t i = 0; i < tensors.size(); ++i) ASSERT_EQ(found[i], tensors[i].data);
    } catch (const Error& error) {
      ASSERT_EQ(error.code(), Errc::io) << error.what();
    }
  }
}

TEST(Stress, PartsOfRandomTensorsWithRandomFailures) {
  std::mt19937 random(4);
  for (int round = 0; round < 30; ++round) {
    const RandomFile made(random, round);
    const auto& tensors = made.tensors;
    PlainSource source(made.bytes);
    source.settings = {.concurrency = 6, .unit_nbytes = 64 << 10, .gap_nbytes = 4096};
    HostEngine engine(2 + round % 3, 1 << 20);
    LoadSettings settings;
    if (made.encrypted) settings.keys = std::make_shared<load::KeyRing>(test_key());
    if (round % 4 == 1) settings.engine = &engine;
    if (round % 5 == 4) source.fail_at = 2 + static_cast<int>(random() % 20);
    try {
      load_parts(source, tensors, settings, static_cast<uint32_t>(round));
    } catch (const Error& error) {
      ASSERT_EQ(error.code(), Errc::io) << error.what();
    }
    ASSERT_EQ(engine.free_buffers(), 2U + round % 3);
  }
}

TEST(Stress, SavesThatFailSomewhereLeaveNothingPublished) {
  std::mt19937 random(2);
  for (int round = 0; round < 20; ++round) {
    const auto tensors = make_tensors(random_sizes(random), static_cast<uint64_t>(round));
    auto sink = std::make_shared<MemorySink>();
    sink->fail_at = static_cast<int>(random() % 6);
    const bool encrypted = round % 3 == 1;
    HostEngine engine(1 + round % 4, 2 << 20);
    save::SaveSession session(sink, 0, {.max_workers = 5, .key = encrypted ? test_key() : nullptr});
    LoadSettings settings;
    if (encrypted) settings.keys = std::make_shared<load::KeyRing>(test_key());
    try {
      write_call(session, tensors, false, round % 2 == 0 ? &engine : nullptr);
      expect_loads(sink->published, tensors, settings);
    } catch (const Error& error) {
      ASSERT_EQ(error.code(), Errc::io) << error.what();
      ASSERT_TRUE(sink->published.empty());
    }
  }
}

TEST(Stress, FailedEncryptedSavesOfLargeTensorsFreeNoBufferThatAnotherWorkerHashes) {
  std::mt19937 random(3);
  const auto tensors = make_tensors({20 << 20, 17 << 20, 25 << 20, 9 << 20}, 7);
  for (int round = 0; round < 60; ++round) {
    auto sink = std::make_shared<MemorySink>();
    sink->bytes.reserve(80 << 20);
    std::stop_source stop;
    const int last = 1 + static_cast<int>(random() % 10);
    if (round % 3 == 2) {
      sink->before_write = [&, left = std::make_shared<std::atomic<int>>(last)](uint64_t) {
        if (--*left == 0) stop.request_stop();
      };
    } else {
      sink->fail_at = last;
    }
    save::SaveSession session(sink, 0, {.max_workers = 6, .key = test_key()});
    EXPECT_THROW(write_call(session, tensors, false, nullptr, stop.get_token()), Error);
    EXPECT_TRUE(sink->published.empty());
  }
}

TEST(Stress, TheFirstFailureOfAGroupSurfacesAndTheOthersStop) {
  for (int round = 0; round < 50; ++round) {
    try {
      for_each_index(4, 4, {}, [&](size_t i, const std::stop_token& stop) {
        if (i == 2) throw Error(Errc::io, "this one");
        Mutex mutex;
        CondVar never;
        MutexLock lock(mutex);
        never.wait(mutex, stop, [] { return false; });
        throw Error(Errc::cancelled, "cancelled");
      });
      FAIL();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Errc::io);
    }
  }
}

}  // namespace
}  // namespace tensorizer::tests
