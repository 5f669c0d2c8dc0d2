// The loop of loads and saves: every unit once, failures and stops, and machines that have no
// thread left to give.
#include "core/run_units.h"

#include <set>

#include "no_threads.h"
#include "session_harness.h"

namespace tensorizer::tests {
namespace {

using testing::NoThreads;

class Noting final : public UnitWorker {
 public:
  Noting(Mutex& mutex, std::multiset<size_t>& units) : mutex_(mutex), units_(units) {}
  void process(size_t unit) override {
    MutexLock lock(mutex_);
    units_.insert(unit);
  }

 private:
  Mutex& mutex_;
  std::multiset<size_t>& units_;
};

std::multiset<size_t> units_run(size_t count, unsigned workers, std::atomic<unsigned>& made) {
  Mutex mutex;
  std::multiset<size_t> units;
  std::atomic<size_t> next{0};
  run_units(count, next, workers, {}, [&](const std::stop_token&) {
    ++made;
    return std::make_unique<Noting>(mutex, units);
  });
  return units;
}

TEST(RunUnits, GivesEveryUnitToOneWorker) {
  std::multiset<size_t> all;
  for (size_t i = 0; i < 1000; ++i) all.insert(i);
  for (const unsigned workers : {1U, 2U, 7U}) {
    std::atomic<unsigned> made{0};
    EXPECT_EQ(units_run(1000, workers, made), all);
    EXPECT_EQ(made, workers);
  }
}

TEST(RunUnits, WithoutThreadsTheCallerDoesAllOfIt) {
  const NoThreads none;
  std::atomic<unsigned> made{0};
  EXPECT_EQ(units_run(100, 5, made).size(), 100U);
  EXPECT_EQ(made, 1U);
}

TEST(ForEachIndex, CallsTheWorkOnceForEveryIndex) {
  for (const unsigned workers : {0U, 1U, 3U, 50U}) {
    std::vector<std::atomic<int>> calls(40);
    for_each_index(calls.size(), workers, {},
                   [&](size_t i, const std::stop_token&) { ++calls[i]; });
    for (const std::atomic<int>& one : calls) EXPECT_EQ(one, 1);
  }
  for_each_index(0, 3, {}, [&](size_t, const std::stop_token&) { FAIL(); });
}

TEST(ForEachIndex, TheFirstFailureStopsTheOthersAndIsRethrown) {
  std::atomic<size_t> begun{0};
  const auto work = [&](size_t i, const std::stop_token&) {
    ++begun;
    if (i == 5) throw Error(Errc::malformed, "five");
  };
  testing::expect_error(Errc::malformed, [&] { for_each_index(1U << 30, 3, {}, work); });
  EXPECT_LT(begun, 1U << 30);
}

TEST(ForEachIndex, AStopEndsInCancelled) {
  std::stop_source stop;
  const auto work = [&](size_t i, const std::stop_token&) {
    if (i == 5) stop.request_stop();
  };
  testing::expect_error(Errc::cancelled,
                        [&] { for_each_index(1U << 30, 3, stop.get_token(), work); });
}

TEST(RunUnits, LoadsAndSavesWorkWithoutThreads) {
  const auto tensors = make_tensors({9 << 20, 100, 5 << 20, 0, 3 << 20}, 3);
  const NoThreads none;
  const save::SaveOptions encrypted{.hashes = {false, true}, .key = test_key()};
  expect_loads(save_all(tensors), tensors, {.workers = 4});
  expect_loads(save_all(tensors, encrypted), tensors,
               {.workers = 4, .keys = std::make_shared<load::KeyRing>(test_key())});
  HostEngine engine(3, 2 << 20);
  expect_loads(save_all(tensors, {}, &engine), tensors, {.workers = 4, .engine = &engine});
}

}  // namespace
}  // namespace tensorizer::tests
