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
    sink->lends = round % 2 == 1;
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
    sink->lends = round % 2 == 1;
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

// Breaks one stage of a load or save after some of its steps: it throws there, or asks for a stop.
class Breaker {
 public:
  Breaker(std::mt19937& random, int most_steps)
      : left_(static_cast<int>(random() % static_cast<unsigned>(most_steps))),
        stops_(random() % 2 == 0) {}
  std::stop_token token() const { return stop_.get_token(); }
  std::function<void()> step(Errc code) {
    return [this, code] {
      if (left_.fetch_sub(1) != 0) return;
      if (!stops_) throw Error(code, "broken here");
      stop_.request_stop();
    };
  }
  bool expects(const Error& error, Errc code) const {
    return error.code() == (stops_ ? Errc::cancelled : code);
  }

 private:
  std::atomic<int> left_;
  const bool stops_;
  std::stop_source stop_;
};

TEST(Stress, EveryStageOfALoadMayFailOrBeStoppedAnywhere) {
  std::mt19937 random(5);
  int broken = 0;
  for (int round = 0; round < 120; ++round) {
    RandomFile made(random, round);
    PlainSource source(made.bytes);
    source.settings = {.concurrency = 6, .unit_nbytes = 64 << 10, .gap_nbytes = 4096};
    HostEngine engine(2 + round % 3, 2 << 20);
    const bool parts = round % 2 == 1;
    LoadSettings settings{.verify = !parts && random() % 2 == 0};
    if (made.encrypted) settings.keys = std::make_shared<load::KeyRing>(test_key());
    const auto opened = open_all(source, settings.keys.get());
    Breaker breaker(random, 20);
    Errc wanted = Errc::io;
    const int stage = round / 2 % 3;
    if (stage == 0) {  // read
      source.before_read = breaker.step(Errc::io);
    } else if (stage == 1) {  // place
      settings.engine = &engine;
      engine.before_copy = breaker.step(wanted = Errc::device);
    } else {  // open or digest: a byte of some payload is another one
      if (!made.encrypted && !settings.verify) continue;
      const format::IndexEntry& entry = opened->index[random() % opened->index.size()];
      if (entry.data_nbytes == 0) continue;
      made.bytes[entry.data_offset + random() % entry.data_nbytes] ^= std::byte{1};
      wanted = made.encrypted ? Errc::crypto : Errc::hash_mismatch;
      if (random() % 2 == 0) settings.engine = &engine;
    }
    std::vector<Bytes> found;
    try {
      if (parts) {
        load_parts(source, made.tensors, settings, static_cast<uint32_t>(round), breaker.token());
      } else {
        load_all(source, settings, found, breaker.token());
        for (size_t i = 0; i < found.size(); ++i) ASSERT_EQ(found[i], made.tensors[i].data);
      }
    } catch (const Error& error) {
      ++broken;
      ASSERT_TRUE(stage == 2 ? error.code() == wanted : breaker.expects(error, wanted))
          << round << ": " << error.what();
      for (const Bytes& bytes : found) {
        ASSERT_TRUE(!made.encrypted || bytes == Bytes(bytes.size()))
            << "not wiped, round " << round;
      }
    }
    ASSERT_EQ(engine.free_buffers(), 2U + round % 3);
  }
  EXPECT_GT(broken, 30);
}

TEST(Stress, EveryStageOfASaveMayFailOrBeStoppedAnywhere) {
  std::mt19937 random(6);
  int broken = 0;
  for (int round = 0; round < 80; ++round) {
    const auto tensors = make_tensors(random_sizes(random), static_cast<uint64_t>(round));
    const auto key = round % 3 == 1 ? test_key() : nullptr;
    auto sink = std::make_shared<MemorySink>();
    sink->lends = round % 5 == 0;
    HostEngine engine(1 + round % 4, 2 << 20);
    Breaker breaker(random, 12);
    const bool from_device = round % 2 == 0;
    const Errc wanted = from_device && round % 4 == 0 ? Errc::device : Errc::io;
    if (wanted == Errc::device) {
      engine.before_copy = breaker.step(wanted);
    } else {
      sink->before_write = [step = breaker.step(wanted)](uint64_t) { step(); };
    }
    save::SaveSession session(sink, 0, {.max_workers = 5, .key = key});
    LoadSettings settings;
    if (key) settings.keys = std::make_shared<load::KeyRing>(key);
    try {
      write_call(session, tensors, false, from_device ? &engine : nullptr, breaker.token());
      expect_loads(sink->published, tensors, settings);
    } catch (const Error& error) {
      ++broken;
      ASSERT_TRUE(breaker.expects(error, wanted)) << round << ": " << error.what();
      ASSERT_TRUE(sink->published.empty());
      sink->before_write = nullptr;  // a session goes on behind a failed call
      engine.before_copy = nullptr;
      write_call(session, tensors, false, from_device ? &engine : nullptr);
      expect_loads(sink->published, tensors, settings);
    }
    ASSERT_EQ(engine.free_buffers(), 1U + round % 4);
  }
  EXPECT_GT(broken, 20);
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
