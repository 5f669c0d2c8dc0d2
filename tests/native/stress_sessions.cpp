// Many threads, small units, random failures: for the thread and address sanitizers.
#include <random>

#include "core/chain_queue.h"
#include "core/run_units.h"
#include "session_harness.h"

namespace tensorizer::tests {
namespace {

std::vector<size_t> random_sizes(std::mt19937& random) {
  std::vector<size_t> sizes(1 + random() % 60);
  for (size_t& size : sizes) size = random() % 5 == 0 ? random() % 700'000 : random() % 3000;
  return sizes;
}

TEST(Stress, LoadsOfRandomTensorsWithSmallUnitsAndRandomFailures) {
  std::mt19937 random(1);
  for (int round = 0; round < 30; ++round) {
    const auto tensors = make_tensors(random_sizes(random), static_cast<uint64_t>(round));
    const bool encrypted = round % 3 == 0;
    save::SaveOptions options;
    if (encrypted) options = {.hashes = {false, true}, .key = test_key()};
    const Bytes file = save_all(tensors, options);
    PlainSource source(file);
    source.settings = {.concurrency = 6, .unit_nbytes = 64 << 10, .gap_nbytes = 4096};
    HostEngine engine(2 + round % 3, 2 << 20);
    LoadSettings settings{.verify = round % 2 == 0};
    if (encrypted) settings.keys = std::make_shared<load::KeyRing>(test_key());
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

TEST(Stress, SavesThatFailSomewhereLeaveNothingPublished) {
  std::mt19937 random(2);
  for (int round = 0; round < 20; ++round) {
    const auto tensors = make_tensors(random_sizes(random), static_cast<uint64_t>(round));
    auto sink = std::make_shared<MemorySink>();
    sink->fail_at = static_cast<int>(random() % 6);
    save::SaveSession session(sink, 0, {.max_workers = 5});
    try {
      write_call(session, tensors);
      expect_loads(sink->published, tensors);
    } catch (const Error& error) {
      ASSERT_EQ(error.code(), Errc::io) << error.what();
      ASSERT_TRUE(sink->published.empty());
    }
  }
}

TEST(Stress, ChainStepsRunInOrderAndAllOfThem) {
  std::mt19937 random(3);
  for (int round = 0; round < 20; ++round) {
    std::vector<uint32_t> lengths(1 + random() % 20);
    for (uint32_t& length : lengths) length = static_cast<uint32_t>(random() % 12);
    ChainQueue queue(lengths);
    std::vector<ChainQueue::Step> input;
    for (uint32_t chain = 0; chain < lengths.size(); ++chain) {
      for (uint32_t step = 0; step < lengths[chain]; ++step) input.push_back({chain, step});
    }
    std::shuffle(input.begin(), input.end(), random);
    std::vector<uint32_t> done(
        lengths.size());  // of each chain: only its owner of the moment touches it
    std::atomic<size_t> next{0};
    auto finish = [&](const ChainQueue::Work& work) {
      for (int i = 0; i < work.count; ++i)
        EXPECT_EQ(done[work.steps[i].chain]++, work.steps[i].step);
      queue.done(work);
    };
    run_workers(4, {}, [&](const std::stop_token& stop) {
      for (size_t i = next++; i < input.size(); i = next++) {
        queue.mark_ready(input[i]);
        if (const auto work = queue.take(i % 2 == 0); work.count > 0) finish(work);
      }
      while (true) {
        const auto work = queue.take_or_wait(stop);
        if (work.count == 0) break;
        finish(work);
      }
    });
    EXPECT_EQ(done, lengths);
  }
}

TEST(Stress, TheFirstFailureOfAGroupSurfacesAndTheOthersStop) {
  for (int round = 0; round < 50; ++round) {
    try {
      run_workers(4, {}, [&](const std::stop_token& stop) {
        static std::atomic<int> turn{0};
        if (turn++ % 4 == 2) throw Error(Errc::io, "this one");
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
