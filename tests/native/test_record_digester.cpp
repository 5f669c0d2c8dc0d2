// Digests of many records, whatever the order in which their bytes come and whoever brings them.
#include "digest/record_digester.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <map>
#include <optional>
#include <random>
#include <thread>

#include "core/run_units.h"
#include "session_harness.h"

namespace tensorizer::tests {
namespace {

using digest::RecordDigester;
using digest::RecordDigests;
using digest::RecordStart;
using digest::StepsInBuffers;

// A header's worth of bytes in front, as hash inputs begin.
RecordStart start_of(const Bytes& header, digest::HashChoice wanted = {}) {
  RecordStart start;
  start.wanted = wanted;
  start.header.crc32 = digest::crc32(0, header);
  start.header.sha256.update(header);
  return start;
}

RecordDigests digests_of(const Bytes& header, const Bytes& payload,
                         digest::HashChoice wanted = {}) {
  Bytes all = header;
  all.insert(all.end(), payload.begin(), payload.end());
  RecordDigests digests;
  if (wanted.crc32) digests.crc32 = digest::crc32(0, all);
  digest::Sha256 sha256;
  sha256.update(all);
  if (wanted.sha256) digests.sha256 = sha256.finish();
  return digests;
}

struct Record {
  Bytes header, payload;
  uint64_t step_nbytes = 0;
  uint32_t steps() const {
    return static_cast<uint32_t>((payload.size() + step_nbytes - 1) / step_nbytes);
  }
  std::span<const std::byte> step(uint32_t number) const {
    const uint64_t at = number * step_nbytes;
    return std::span(payload).subspan(at, std::min<uint64_t>(step_nbytes, payload.size() - at));
  }
};

// What was completed, and that nothing was completed twice.
class Results {
 public:
  RecordDigester::Completed note() {
    return [this](uint32_t record, const RecordDigests& digests) {
      MutexLock lock(mutex_);
      EXPECT_TRUE(found_.emplace(record, digests).second) << record;
    };
  }
  void expect(uint32_t record, const RecordDigests& wanted) {
    MutexLock lock(mutex_);
    ASSERT_TRUE(found_.count(record)) << record;
    EXPECT_EQ(found_[record].crc32, wanted.crc32) << record;
    EXPECT_EQ(found_[record].sha256, wanted.sha256) << record;
  }
  size_t count() {
    MutexLock lock(mutex_);
    return found_.size();
  }

 private:
  Mutex mutex_;
  std::map<uint32_t, RecordDigests> found_;
};

TEST(RecordDigester, RecordsThatComeWholeAreDigestedWhateverIsWantedOfThem) {
  const std::vector<uint32_t> steps(9, 0);
  std::vector<Record> records;
  std::vector<RecordDigester::Whole> whole;
  Results results;
  RecordDigester digester(steps, {}, results.note());
  for (uint32_t i = 0; i < 9; ++i)
    records.push_back(
        {testing::random_bytes(40 + i, i), testing::random_bytes(i * i * 37, 50 + i)});
  const auto wanted = [](uint32_t i) {
    return digest::HashChoice{.crc32 = i % 3 != 0, .sha256 = i % 4 != 1};
  };
  for (uint32_t i = 0; i < 9; ++i)
    whole.push_back({i, start_of(records[i].header, wanted(i)), records[i].payload});
  digester.add_whole(whole);
  for (uint32_t i = 0; i < 9; ++i)
    results.expect(i, digests_of(records[i].header, records[i].payload, wanted(i)));
  digester.finish({});  // nothing is left: returns at once
}

TEST(RecordDigester, StepsComeInAnyOrderAndTheRecordIsCompletedWithTheLast) {
  const Record record{testing::random_bytes(100, 1), testing::random_bytes(10'000, 2), 1000};
  for (const digest::HashChoice wanted :
       {digest::HashChoice{}, {.crc32 = true, .sha256 = false}, {.crc32 = false, .sha256 = true}}) {
    Results results;
    RecordDigester digester(std::vector{record.steps()}, {}, results.note());
    for (uint32_t step = record.steps(); step-- > 1;) digester.add(0, step, record.step(step));
    digester.expect(0, start_of(record.header, wanted));
    EXPECT_FALSE(digester.help());
    digester.add(0, 0, record.step(0));
    EXPECT_EQ(results.count(), 0U);
    digester.finish({});
    results.expect(0, digests_of(record.header, record.payload, wanted));
  }
}

TEST(RecordDigester, HelpNeverTakesOneRecordAlone) {
  const Record a{testing::random_bytes(10, 1), testing::random_bytes(3000, 2), 1000},
      b{testing::random_bytes(20, 3), testing::random_bytes(4100, 4), 1500};
  Results results;
  RecordDigester digester(std::vector{a.steps(), b.steps()}, {}, results.note());
  digester.expect(0, start_of(a.header));
  digester.expect(1, start_of(b.header));
  for (uint32_t step = 0; step < a.steps(); ++step) digester.add(0, step, a.step(step));
  EXPECT_FALSE(digester.help());
  for (uint32_t step = 0; step < b.steps(); ++step) digester.add(1, step, b.step(step));
  while (digester.help()) {
  }
  digester.finish({});
  results.expect(0, digests_of(a.header, a.payload));
  results.expect(1, digests_of(b.header, b.payload));
}

// Records of `steps` steps each, and a digester that has all of them.
struct ManyRecords {
  ManyRecords(size_t count, uint32_t steps, RecordDigester::Use use) {
    for (uint32_t i = 0; i < count; ++i)
      records.push_back(
          {testing::random_bytes(70 + i, i), testing::random_bytes(steps * 500 - i, 300 + i), 500});
    digester.emplace(std::vector(count, steps), use, results.note());
    for (uint32_t i = 0; i < count; ++i) digester->expect(i, start_of(records[i].header));
  }
  void add(uint32_t record, uint32_t step) {
    digester->add(record, step, records[record].step(step));
  }
  void expect_all() {
    digester->finish({});
    for (uint32_t i = 0; i < records.size(); ++i)
      results.expect(i, digests_of(records[i].header, records[i].payload));
  }

  std::vector<Record> records;
  Results results;
  std::optional<RecordDigester> digester;
};

TEST(RecordDigester, BytesThatStayGatherUntilAllLanesAreFull) {
  const auto lanes = static_cast<uint32_t>(std::max<size_t>(digest::Sha256::lanes(), 2));
  ManyRecords many(lanes + 3, 2, {.workers = 2, .bytes_stay = true});
  for (uint32_t record = 0; record + 1 < lanes; ++record) {
    many.add(record, 0);
    EXPECT_FALSE(many.digester->help()) << record;
  }
  many.add(lanes - 1, 0);
  EXPECT_TRUE(many.digester->help());
  for (uint32_t record = 0; record < lanes + 3; ++record) {
    many.add(record, 1);
    if (record >= lanes) many.add(record, 0);
  }
  many.expect_all();
}

TEST(RecordDigester, BytesThatStayAreHashedBeforeTooManyOfFewRecordsGather) {
  ManyRecords many(2, 100, {.workers = 1, .bytes_stay = true});
  uint32_t gathered = 0, most = 0;
  for (uint32_t step = 0; step < 100; ++step) {
    for (const uint32_t record : {0U, 1U}) {
      many.add(record, step);
      most = std::max(most, ++gathered);
      while (many.digester->help()) gathered -= static_cast<uint32_t>(digest::Sha256::at_once(2));
    }
  }
  EXPECT_LE(most, 32U);
  many.expect_all();
}

TEST(RecordDigester, ALongRecordIsHashedBesideOneOtherAndDoesNotEndLast) {
  constexpr uint32_t kShort = 40, kLong = 100;
  std::vector<uint32_t> steps(kShort, 1);
  steps.push_back(kLong);
  const Record brief{testing::random_bytes(10, 1), testing::random_bytes(500, 2), 500};
  const Record drawn_out{testing::random_bytes(10, 3), testing::random_bytes(kLong * 500, 4), 500};
  Results results;
  RecordDigester digester(steps, {.workers = 1, .bytes_stay = true}, results.note());
  for (uint32_t record = 0; record < kShort; ++record) {
    digester.expect(record, start_of(brief.header));
    digester.add(record, 0, brief.step(0));
  }
  digester.expect(kShort, start_of(drawn_out.header));
  for (uint32_t step = 0; step < kLong; ++step) digester.add(kShort, step, drawn_out.step(step));
  for (size_t calls = 1; calls < kShort; ++calls) {
    EXPECT_TRUE(digester.help());
    EXPECT_LE(results.count(), calls);
  }
  digester.finish({});
  EXPECT_EQ(results.count(), kShort + 1);
  results.expect(kShort, digests_of(drawn_out.header, drawn_out.payload));
}

TEST(RecordDigester, ManyRecordsOfUnequalStepsAreDigestedByAnyNumberOfThreads) {
  std::vector<Record> records;
  std::vector<uint32_t> steps;
  std::vector<std::pair<uint32_t, uint32_t>> order;
  for (uint32_t i = 0; i < 60; ++i) {
    records.push_back({testing::random_bytes(64 + i, i),
                       testing::random_bytes(1 + i * i * 13, 90 + i), 700 + 100 * (i % 5)});
    steps.push_back(records.back().steps());
    for (uint32_t step = 0; step < steps.back(); ++step) order.emplace_back(i, step);
  }
  for (const uint32_t seed : {1U, 2U, 3U}) {
    // Steps are added in any order; whoever adds the first of a record expects it.
    std::shuffle(order.begin(), order.end(), std::mt19937(seed));
    for (const unsigned workers : {1U, 2U, 8U}) {
      for (const bool bytes_stay : {false, true}) {
        Results results;
        RecordDigester digester(steps, {workers, bytes_stay}, results.note());
        std::atomic<size_t> next{0};
        for_each_index(workers, workers, {}, [&](size_t, const std::stop_token& stop) {
          for (size_t i = next++; i < order.size(); i = next++) {
            const auto [record, step] = order[i];
            if (step == 0) digester.expect(record, start_of(records[record].header));
            digester.add(record, step, records[record].step(step));
            while (digester.help()) {
            }
          }
          digester.finish(stop);
        });
        for (uint32_t i = 0; i < records.size(); ++i)
          results.expect(i, digests_of(records[i].header, records[i].payload));
      }
    }
  }
}

TEST(RecordDigester, ABufferMayBeUsedAgainOnceItsStepWasWaitedFor) {
  constexpr uint64_t kStep = 4096;
  std::vector<Record> records;
  std::vector<uint32_t> steps;
  for (uint32_t i = 0; i < 6; ++i) {
    records.push_back({testing::random_bytes(64, i),
                       testing::random_bytes(kStep * (3 + i) + 5 * i, 90 + i), kStep});
    steps.push_back(records.back().steps());
  }
  std::vector<std::pair<uint32_t, uint32_t>> order;  // dealt round-robin, as a plan does
  for (uint32_t step = 0; step < 20; ++step) {
    for (uint32_t i = 0; i < records.size(); ++i)
      if (step < steps[i]) order.emplace_back(i, step);
  }
  for (const unsigned workers : {1U, 3U, 8U}) {
    Results results;
    RecordDigester digester(steps, {}, results.note());
    std::atomic<size_t> next{0};
    for_each_index(workers, workers, {}, [&](size_t, const std::stop_token& stop) {
      Bytes buffer(kStep);
      for (size_t i = next++; i < order.size(); i = next++) {
        const auto [record, step] = order[i];
        const auto bytes = records[record].step(step);
        std::copy(bytes.begin(), bytes.end(), buffer.begin());
        if (step == 0) digester.expect(record, start_of(records[record].header));
        digester.add(record, step, std::span(buffer).first(bytes.size()));
        digester.wait(record, step, stop);
        std::fill(buffer.begin(), buffer.end(), std::byte{0xEE});
      }
      digester.finish(stop);
    });
    for (uint32_t i = 0; i < records.size(); ++i)
      results.expect(i, digests_of(records[i].header, records[i].payload));
  }
}

TEST(RecordDigester, ARecordMayComeInOneStep) {
  const Record record{testing::random_bytes(100, 1), testing::random_bytes(1000, 2), 1000};
  Results results;
  RecordDigester digester(std::vector{1U}, {}, results.note());
  digester.expect(0, start_of(record.header));
  digester.add(0, 0, record.payload);
  digester.wait(0, 0, {});
  results.expect(0, digests_of(record.header, record.payload));
}

TEST(RecordDigester, ARecordWithoutSha256IsNotWaitedFor) {
  const Record record{testing::random_bytes(10, 1), testing::random_bytes(3000, 2), 1000};
  Results results;
  RecordDigester digester(std::vector{record.steps()}, {}, results.note());
  digester.expect(0, start_of(record.header, {.crc32 = true, .sha256 = false}));
  digester.add(0, 2, record.step(2));
  digester.wait(0, 2, {});  // the steps before it never came
}

TEST(RecordDigester, AStopEndsEveryWait) {
  const Record record{testing::random_bytes(10, 1), testing::random_bytes(3000, 2), 1000};
  Results results;
  RecordDigester digester(std::vector{record.steps()}, {}, results.note());
  digester.add(0, 2, record.step(2));
  std::stop_source stop;
  stop.request_stop();
  for (const auto& waits : {std::function([&] { digester.wait(0, 2, stop.get_token()); }),
                            std::function([&] { digester.finish(stop.get_token()); })}) {
    try {
      waits();
      FAIL();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Errc::cancelled);
    }
  }
}

TEST(RecordDigester, WhatTheCompletionThrowsReachesTheCaller) {
  const Record record{testing::random_bytes(10, 1), testing::random_bytes(3000, 2), 1000};
  const auto refuse = [](uint32_t, const RecordDigests&) {
    throw Error(Errc::hash_mismatch, "no match");
  };
  RecordDigester digester(std::vector{0U, record.steps()}, {}, refuse);
  std::vector<RecordDigester::Whole> whole{{0, start_of(record.header), record.payload}};
  EXPECT_THROW(digester.add_whole(whole), Error);
  digester.expect(1, start_of(record.header));
  for (uint32_t step = 0; step < record.steps(); ++step) digester.add(1, step, record.step(step));
  EXPECT_THROW(digester.finish({}), Error);
}

TEST(RecordDigester, BuffersOfAWorkerThatEndsEarlyStayUntilNobodyHashesFromThem) {
  const Record record{testing::random_bytes(10, 1), testing::random_bytes(3000, 2), 1000};
  std::atomic<bool> hashing{false}, buffer_is_gone{false}, gone_while_hashing{false};
  const auto look = [&](uint32_t, const RecordDigests&) {
    hashing = true;
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    gone_while_hashing = buffer_is_gone.load();
  };
  RecordDigester digester(std::vector{1U, record.steps()}, {}, look);
  digester.expect(0, start_of(record.header));
  digester.expect(1, start_of(record.header));
  digester.add(0, 0, record.payload);
  std::stop_source stop;
  std::thread other([&] { EXPECT_THROW(digester.finish(stop.get_token()), Error); });
  {
    StepsInBuffers buffers(&digester);
    buffers.begin_buffer();
    buffers.add({0, 0});
    while (!hashing) std::this_thread::yield();
  }
  buffer_is_gone = true;
  digester.add(1, 0, {});  // nobody looks at steps that come later
  stop.request_stop();
  other.join();
  EXPECT_FALSE(gone_while_hashing);
  EXPECT_FALSE(digester.help());
}

}  // namespace
}  // namespace tensorizer::tests
