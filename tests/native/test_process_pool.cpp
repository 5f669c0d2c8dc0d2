// Threads for work of the process.
#include "core/process_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <system_error>
#include <thread>
#include <vector>

#include "forks.h"
#include "no_threads.h"

namespace tensorizer {
namespace {

TEST(ProcessPool, JobsRunAtTheSameTimeAndMayWaitForEachOther) {
  constexpr int kJobs = 20;
  std::atomic<int> here{0};
  std::vector<ProcessJob> jobs;
  for (int i = 0; i < kJobs; ++i)
    jobs.push_back(ProcessPool::instance().start([&] {
      ++here;
      while (here < kJobs) std::this_thread::yield();
    }));
  for (const ProcessJob& job : jobs) job.join();
  EXPECT_EQ(here, kJobs);
  ProcessJob().join();
}

TEST(ProcessPool, AJobLetsGoOfWhatItHoldsBeforeItHasEnded) {
  const auto held = std::make_shared<int>(1);
  for (int i = 0; i < 100; ++i) {
    ProcessPool::instance().start([held] {}).join();
    EXPECT_EQ(held.use_count(), 1);
  }
}

TEST(ProcessPool, WithoutAThreadAJobIsRefusedAndLaterOnesRun) {
  {
    const testing::NoThreads none;
    EXPECT_THROW(ProcessPool::instance().start([] { FAIL(); }), std::system_error);
  }
  std::atomic<bool> ran{false};
  ProcessPool::instance().start([&] { ran = true; }).join();
  EXPECT_TRUE(ran);
}

#if !defined(TENSORIZER_TSAN)  // which does not support threads in a child of a threaded process
TEST(ProcessPool, AForkedChildWaitsForNoJobOfItsParentAndHasJobsOfItsOwn) {
  std::atomic<bool> ends{false};
  const ProcessJob job = ProcessPool::instance().start([&] {
    while (!ends) std::this_thread::yield();
  });
  EXPECT_TRUE(testing::ends_well_in_child([&] {
    job.join();
    bool ran = false;
    ProcessPool::instance().start([&] { ran = true; }).join();
    return ran;
  }));
  ends = true;
  job.join();
}
#endif

}  // namespace
}  // namespace tensorizer
