// The multipart sink against a transport in memory: what is stored, in which order, within which
// memory, and that a failure leaves nothing.
#include "io/upload/multipart_sink.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <map>
#include <mutex>
#include <numeric>
#include <random>
#include <thread>

#include "bytes.h"
#include "core/error.h"
#include "digest/digest.h"
#include "no_threads.h"
#include "session_harness.h"

namespace tensorizer::io {
namespace {

using testing::Bytes;
using testing::random_bytes;
using testing::same;

constexpr uint64_t kPart = 256 << 10;

// What an object store holds and was asked; outlives the sink.
struct Store {
  std::mutex mutex;
  std::map<int, Bytes> parts;
  std::vector<int> order;  // part numbers as their uploads ended
  Bytes object;
  bool has_object = false;
  int created = 0, completed = 0, aborted = 0, single_puts = 0;
  int running = 0, most_running = 0;
  int fail_part = 0;  // number of the part that fails
  bool fail_create = false, fail_complete = false;
  std::chrono::milliseconds delay{0};
  std::atomic<bool> hang{false};  // uploads wait for their stop
  int hang_below = 0;             // uploads wait until so many ran at the same time

  bool is_uploading() {
    const std::lock_guard lock(mutex);
    return running > 0;
  }
};

class FakeTransport final : public MultipartTransport {
 public:
  explicit FakeTransport(Store& store) : store_(store) {}

  void create(const std::stop_token&) override {
    std::lock_guard lock(store_.mutex);
    ++store_.created;
    if (store_.fail_create) throw Error(Errc::io, "create failed");
  }

  std::string put_part(int number, ConstBuffer bytes, const std::stop_token& stop) override {
    {
      std::lock_guard lock(store_.mutex);
      EXPECT_GT(store_.created, 0);
      store_.most_running = std::max(store_.most_running, ++store_.running);
    }
    std::this_thread::sleep_for(store_.delay);
    for (int i = 0; i < 30'000 && !stop.stop_requested(); ++i) {
      {
        std::lock_guard lock(store_.mutex);
        if (store_.most_running >= store_.hang_below) break;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    while (store_.hang && !stop.stop_requested())
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    std::lock_guard lock(store_.mutex);
    --store_.running;
    EXPECT_EQ(store_.aborted, 0) << "the upload was aborted while a part was on its way";
    if (stop.stop_requested()) throw Error(Errc::cancelled, "cancelled");
    if (number == store_.fail_part) throw Error(Errc::io, "part failed");
    store_.parts[number] = Bytes(bytes.begin(), bytes.end());
    store_.order.push_back(number);
    return "etag" + std::to_string(number);
  }

  void complete(const std::vector<std::string>& etags, const std::stop_token&) override {
    std::lock_guard lock(store_.mutex);
    if (store_.fail_complete) throw Error(Errc::io, "complete failed");
    EXPECT_EQ(etags.size(), store_.parts.size());
    for (size_t i = 0; i < etags.size(); ++i) {
      EXPECT_EQ(etags[i], "etag" + std::to_string(i + 1));
      const Bytes& part = store_.parts.at(static_cast<int>(i) + 1);
      store_.object.insert(store_.object.end(), part.begin(), part.end());
    }
    store_.has_object = true;
    ++store_.completed;
  }

  void abort() noexcept override {
    std::lock_guard lock(store_.mutex);
    EXPECT_EQ(store_.running, 0);
    ++store_.aborted;
  }

  void put_object(ConstBuffer bytes, const std::stop_token&) override {
    std::lock_guard lock(store_.mutex);
    store_.object.assign(bytes.begin(), bytes.end());
    store_.has_object = true;
    ++store_.single_puts;
  }

 private:
  Store& store_;
};

class MultipartSinkTest : public ::testing::Test {
 protected:
  std::unique_ptr<MultipartSink> make(unsigned uploads = 3, uint64_t budget_nbytes = 0) {
    MultipartOptions options;
    options.uploads = uploads;
    options.budget_nbytes = budget_nbytes;
    options.min_part_nbytes = options.max_part_nbytes = kPart;
    return std::make_unique<MultipartSink>(std::make_unique<FakeTransport>(store_), "s3://b/k",
                                           options);
  }

  void write(MultipartSink& sink, const Bytes& data, uint64_t begin, uint64_t end) {
    sink.write_at(begin, ConstBuffer(data).subspan(begin, end - begin), stop_);
  }

  void expect_nothing_stored(int aborted) {
    EXPECT_FALSE(store_.has_object);
    EXPECT_EQ(store_.completed, 0);
    EXPECT_EQ(store_.aborted, aborted);
    EXPECT_EQ(store_.running, 0);
  }

  Store store_;
  std::stop_token stop_;
};

TEST(ByteRangesTest, AgreesWithASetOfPositions) {
  std::mt19937 generator(7);
  for (int round = 0; round < 200; ++round) {
    ByteRanges ranges;
    std::vector<bool> expected(64);
    for (int i = 0; i < 12; ++i) {
      const uint64_t begin = generator() % 60, end = begin + generator() % 5;
      ranges.add(begin, end);
      std::fill(expected.begin() + static_cast<ptrdiff_t>(begin),
                expected.begin() + static_cast<ptrdiff_t>(end), true);
    }
    if (round % 2) {
      const uint64_t at = generator() % 50, gap = generator() % 10;
      ranges.insert_gap(at, gap);
      expected.insert(expected.begin() + static_cast<ptrdiff_t>(at), gap, false);
    }
    for (uint64_t begin = 0; begin < 60; ++begin) {
      uint64_t missing = begin;
      while (missing < 60 && expected[missing]) ++missing;
      EXPECT_EQ(ranges.first_missing(begin, 60), missing);
    }
  }
}

TEST(PartSizesTest, TenThousandPartsHoldTheLargestObjectWithinTheStoresLimits) {
  const uint64_t mib = 1 << 20;
  for (uint64_t expected :
       {uint64_t{0}, uint64_t{1}, 100 * mib, 1'000'000 * mib, kMaxObjectNbytes}) {
    const PartSizes sizes(expected, 16 * mib, 64 * mib);
    uint64_t total = 0, parts_needed = 0;
    for (uint64_t i = 0; i < kMaxParts; ++i) {
      EXPECT_GE(sizes.nbytes(i), 16 * mib);
      EXPECT_LE(sizes.nbytes(i), 5120 * mib);
      parts_needed += total < expected;
      total += sizes.nbytes(i);
    }
    EXPECT_GE(total, kMaxObjectNbytes);
    EXPECT_LE(parts_needed, 6000u);
    EXPECT_EQ(sizes.nbytes(0), sizes.nbytes(5999)) << "parts of announced content have one size";
  }
  EXPECT_EQ(PartSizes(1000 * mib, 16 * mib, 64 * mib).nbytes(0), 16 * mib);
  EXPECT_EQ(PartSizes(100'000 * mib, 16 * mib, 64 * mib).nbytes(0), 64 * mib);
}

TEST_F(MultipartSinkTest, ASmallObjectIsOnePut) {
  const Bytes data = random_bytes(kPart - 1);
  auto sink = make();
  write(*sink, data, 100, data.size());
  write(*sink, data, 0, 100);
  sink->publish(data.size(), stop_);
  EXPECT_FALSE(store_.has_object) << "the object appears when it is finished";
  sink->finish(stop_);
  EXPECT_TRUE(same(store_.object, data));
  EXPECT_EQ(store_.single_puts, 1);
  EXPECT_EQ(store_.created, 0);
}

TEST_F(MultipartSinkTest, SizesAroundThePartEdgeComeBackAsWritten) {
  for (uint64_t nbytes : {uint64_t{1}, kPart - 1, kPart, kPart + 1, 2 * kPart, 3 * kPart + 5}) {
    store_.parts.clear();
    store_.object.clear();
    const Bytes data = random_bytes(nbytes);
    auto sink = make();
    sink->reserve(nbytes);
    for (uint64_t at = 0; at < nbytes; at += 70'000)
      write(*sink, data, at, std::min(nbytes, at + 70'000));
    sink->publish(nbytes, stop_);
    sink->finish(stop_);
    EXPECT_TRUE(same(store_.object, data)) << nbytes;
  }
  EXPECT_EQ(store_.aborted, 0);
}

TEST_F(MultipartSinkTest, PartsGoUpWhileOthersAreWrittenAndTheFirstGoesLast) {
  const Bytes data = random_bytes(6 * kPart);
  auto sink = make();
  sink->reserve_head(1000);
  sink->reserve(data.size());
  write(*sink, data, 1000, data.size());
  for (int i = 0; i < 2000; ++i) {
    {
      std::lock_guard lock(store_.mutex);
      if (store_.parts.size() == 4) break;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  {
    std::lock_guard lock(store_.mutex);
    EXPECT_EQ(store_.parts.size(), 4u) << "all but the part of the head and the one at the tail";
  }
  write(*sink, data, 0, 1000);
  write(*sink, data, 0, 1000);  // the head may be written again
  sink->publish(data.size(), stop_);
  sink->finish(stop_);
  EXPECT_TRUE(same(store_.object, data));
  EXPECT_EQ(store_.aborted, 0);
}

TEST_F(MultipartSinkTest, AnyOrderOfWritesFromManyThreadsGivesTheSameObject) {
  const Bytes data = random_bytes(20 * kPart + 77);
  for (unsigned seed = 0; seed < 5; ++seed) {
    store_.parts.clear();
    store_.object.clear();
    std::vector<uint64_t> cuts;
    for (uint64_t at = 0; at < data.size(); at += 30'000) cuts.push_back(at);
    std::mt19937 generator(seed);
    if (seed == 1) std::reverse(cuts.begin(), cuts.end());
    if (seed > 1) std::shuffle(cuts.begin(), cuts.end(), generator);
    auto sink = make(2, 3 * kPart);
    sink->reserve(data.size());
    std::atomic<size_t> next{0}, filled{0};
    std::vector<std::thread> writers;
    for (int i = 0; i < 4; ++i)
      writers.emplace_back([&] {
        for (size_t j = next++; j < cuts.size(); j = next++) {
          const uint64_t end = std::min<uint64_t>(data.size(), cuts[j] + 30'000);
          const ConstBuffer from = ConstBuffer(data).subspan(cuts[j], end - cuts[j]);
          const auto fill = [&](Buffer room) { std::ranges::copy(from, room.begin()); };
          if (j % 2 == 0 && sink->fill_at(cuts[j], from.size(), fill, stop_)) {
            ++filled;
          } else {
            write(*sink, data, cuts[j], end);
          }
        }
      });
    for (std::thread& writer : writers) writer.join();
    sink->publish(data.size(), stop_);
    sink->finish(stop_);
    EXPECT_TRUE(same(store_.object, data)) << seed;
    EXPECT_GT(filled, cuts.size() / 3) << "only what straddles two parts has no room in one piece";
  }
}

TEST_F(MultipartSinkTest, MemoryStaysWithinTheBudgetWhenUploadsAreSlow) {
  const Bytes data = random_bytes(40 * kPart);
  store_.delay = std::chrono::milliseconds(3);
  auto sink = make(2, 5 * kPart);
  sink->reserve(data.size());
  for (uint64_t at = 0; at < data.size(); at += kPart / 4) write(*sink, data, at, at + kPart / 4);
  sink->publish(data.size(), stop_);
  sink->finish(stop_);
  EXPECT_TRUE(same(store_.object, data));
  EXPECT_LE(sink->peak_nbytes(), 5 * kPart);
  EXPECT_EQ(store_.most_running, 2);
}

// An upload on a machine with more processors than this one.
class ManyWriters final : public RangeSink {
 public:
  ManyWriters(std::shared_ptr<MultipartSink> sink, unsigned writers)
      : sink_(std::move(sink)), writers_(writers) {}
  const std::string& name() const noexcept override { return sink_->name(); }
  unsigned concurrency() const noexcept override { return writers_; }
  bool any_order() const noexcept override { return sink_->any_order(); }
  unsigned places() const override { return sink_->places(); }
  bool make_room(uint64_t begin, uint64_t end, RoomWish wish) override {
    return sink_->make_room(begin, end, wish);
  }
  void reserve_head(uint64_t end) override { sink_->reserve_head(end); }
  void reserve(uint64_t end) override { sink_->reserve(end); }
  void write_at(uint64_t offset, std::span<const ConstBuffer> buffers,
                const std::stop_token& stop) override {
    sink_->write_at(offset, buffers, stop);
  }
  bool fill_at(uint64_t offset, uint64_t nbytes, const std::function<void(Buffer)>& fill,
               const std::stop_token& stop) override {
    return sink_->fill_at(offset, nbytes, fill, stop);
  }
  void relocate(uint64_t from, uint64_t nbytes, uint64_t to, const std::stop_token& stop) override {
    sink_->relocate(from, nbytes, to, stop);
  }
  void publish(uint64_t end, const std::stop_token& stop) override { sink_->publish(end, stop); }
  void rollback(uint64_t end) noexcept override { sink_->rollback(end); }
  void abandon() noexcept override { sink_->abandon(); }
  void finish(const std::stop_token& stop) override { sink_->finish(stop); }

 private:
  const std::shared_ptr<MultipartSink> sink_;
  const unsigned writers_;
};

// Keeps the digest of each part only, and is slower than those who write.
class SlowStore final : public MultipartTransport {
 public:
  explicit SlowStore(std::vector<digest::Sha256Digest>& parts) : parts_(parts) {}
  void create(const std::stop_token&) override {}
  std::string put_part(int number, ConstBuffer bytes, const std::stop_token&) override {
    std::this_thread::sleep_for(std::chrono::milliseconds(bytes.size() >> 20));
    digest::Sha256 sha256;
    sha256.update(bytes);
    const std::lock_guard lock(mutex_);
    parts_.resize(std::max(parts_.size(), static_cast<size_t>(number)));
    parts_[static_cast<size_t>(number) - 1] = sha256.finish();
    return "etag";
  }
  void complete(const std::vector<std::string>&, const std::stop_token&) override {}
  void abort() noexcept override {}
  void put_object(ConstBuffer, const std::stop_token&) override { ADD_FAILURE() << "one part"; }

 private:
  std::mutex mutex_;
  std::vector<digest::Sha256Digest>& parts_;
};

struct SaveToStore {
  save::SaveOptions options{};
  bool from_device = false;
  std::vector<size_t> sizes{};
};

// The digests of the parts, and the most memory that parts have taken.
uint64_t save_to_store(const SaveToStore& what, unsigned writers, const MultipartOptions& limits,
                       std::vector<digest::Sha256Digest>& parts) {
  static const Bytes content = random_bytes(size_t{90} << 20, 11);
  auto sink =
      std::make_shared<MultipartSink>(std::make_unique<SlowStore>(parts), "s3://b/k", limits);
  tests::HostEngine engine(5, size_t{4} << 20);
  save::SaveSession session(std::make_shared<ManyWriters>(sink, writers), 0, what.options);
  std::vector<save::TensorToWrite> plan;
  std::vector<format::TensorPath> paths;
  std::vector<device::TensorMemory> payloads;
  for (const size_t nbytes : what.sizes) {
    const std::string name = "t" + std::to_string(plan.size());
    paths.push_back({name});
    plan.push_back({.name = name, .dtype = "|u1", .shape = {nbytes}, .data_nbytes = nbytes});
    payloads.push_back({const_cast<std::byte*>(content.data()), nbytes, nullptr});
  }
  session.begin_call(std::move(plan), paths, {}, false, {});
  session.write_payloads(payloads, what.from_device ? &engine : nullptr, {});
  session.finish_call({});
  session.finish({});
  return sink->peak_nbytes();
}

TEST(MultipartSinkMemory, StaysWithinTheBudgetHoweverManyProcessorsWrite) {
  const auto key = tests::test_key();
  constexpr size_t kMiB = 1 << 20;
  MultipartOptions limits;
  limits.min_part_nbytes = limits.max_part_nbytes = 8 * kMiB;
  limits.uploads = 6;
  const uint64_t budget = (limits.uploads + 2) * limits.min_part_nbytes;
  const std::vector<size_t> equal(12, 20 * kMiB);
  std::vector<size_t> mixed = {85 * kMiB, 1, 9 * kMiB, 0, 40 * kMiB + 77};
  for (size_t i = 0; i < 60; ++i) mixed.push_back((i * 37 % 23) * 200'000 + i);
  mixed.push_back(30 * kMiB);
  const SaveToStore kinds[] = {
      {{.hashes = {true, true}}, false, equal},
      {{.hashes = {true, true}}, false, mixed},
      {{.hashes = {false, false}}, false, equal},
      {{.hashes = {true, true}}, true, equal},
      {{.hashes = {true, true}}, true, mixed},
      {{.hashes = {false, true}, .key = key}, false, equal},
      {{.hashes = {false, true}, .key = key}, false, mixed},
      {{.hashes = {false, false}, .key = key}, false, mixed},
      {{.hashes = {false, true}, .key = key}, true, equal},
  };
  for (const SaveToStore& kind : kinds) {
    const auto said = [&] { return static_cast<size_t>(&kind - kinds); };
    std::vector<digest::Sha256Digest> by_one;
    EXPECT_LE(save_to_store(kind, 1, limits, by_one), budget) << said();
    std::vector<digest::Sha256Digest> parts;
    EXPECT_LE(save_to_store(kind, 64, limits, parts), budget) << said();
    if (!kind.options.key) {
      EXPECT_TRUE(parts == by_one) << said();
    }
  }
}

TEST(MultipartSinkMemory, NoOrderOfUnitsLocksWritersUpHoweverSmallTheBudgetIs) {
  const auto key = tests::test_key();
  MultipartOptions limits;
  limits.min_part_nbytes = limits.max_part_nbytes = 300'000;  // a unit has several
  const std::vector<size_t> sizes = {5'000'000, 17, 9'000'000, 400'000, 30'000'000, 300'000, 1};
  for (const uint64_t budget : {uint64_t{300'000}, uint64_t{900'000}, uint64_t{0}}) {
    limits.uploads = budget == 0 ? 1 : 3;
    limits.budget_nbytes = budget;
    for (const bool from_device : {false, true}) {
      std::vector<digest::Sha256Digest> parts;
      save_to_store({{.hashes = {false, true}, .key = key}, from_device, sizes}, 64, limits, parts);
      EXPECT_GT(parts.size(), 100U);
    }
  }
}

TEST_F(MultipartSinkTest, AnEncryptedSaveByManyComesBack) {
  const auto tensors = tests::make_tensors({3'000'000, 5, 4'000'000, 0, 2'500'000, 100'000}, 12);
  std::shared_ptr<MultipartSink> sink = make();
  save::SaveSession session(std::make_shared<ManyWriters>(sink, 16), 0,
                            {.hashes = {false, true}, .key = tests::test_key()});
  tests::write_call(session, tensors);
  session.finish({});
  tests::expect_loads(store_.object, tensors,
                      {.keys = std::make_shared<load::KeyRing>(tests::test_key())});
}

TEST_F(MultipartSinkTest, AsManyPartsAreOnTheirWayAsThereAreUploads) {
  const Bytes data = random_bytes(60 * kPart);
  for (unsigned uploads : {1u, 32u}) {
    store_.parts.clear();
    store_.object.clear();
    store_.most_running = 0;
    store_.hang_below = static_cast<int>(uploads);
    auto sink = make(uploads);
    sink->reserve(data.size());
    for (uint64_t at = 0; at < data.size(); at += kPart / 4) write(*sink, data, at, at + kPart / 4);
    sink->publish(data.size(), stop_);
    sink->finish(stop_);
    EXPECT_TRUE(same(store_.object, data));
    EXPECT_EQ(store_.most_running, static_cast<int>(uploads));
    EXPECT_LE(sink->peak_nbytes(), (uploads + 2) * kPart);
  }
}

TEST_F(MultipartSinkTest, AFinishedSinkIsFinishedAgainWithoutEffectAndTakesNoMoreBytes) {
  const Bytes data = random_bytes(3 * kPart);
  auto sink = make();
  EXPECT_FALSE(sink->has_content());
  write(*sink, data, 0, data.size());
  EXPECT_FALSE(sink->has_content());
  sink->publish(data.size(), stop_);
  EXPECT_TRUE(sink->has_content());
  sink->finish(stop_);
  sink->finish(stop_);
  sink->abandon();
  EXPECT_TRUE(same(store_.object, data));
  EXPECT_EQ(store_.completed, 1);
  EXPECT_EQ(store_.aborted, 0);
  EXPECT_THROW(write(*sink, data, 0, 1), Error);
}

TEST_F(MultipartSinkTest, SeveralCallsExtendTheObjectAndRewriteHeadAndEndMark) {
  const Bytes data = random_bytes(7 * kPart);
  const Bytes noise = random_bytes(8 * kPart, 2);
  auto sink = make();
  sink->reserve_head(500);
  uint64_t begin = 500;
  for (uint64_t end : {2 * kPart - 8, 3 * kPart - 4, 5 * kPart, 7 * kPart - 8}) {
    sink->reserve(end + 8);
    write(*sink, data, begin, end);
    write(*sink, noise, end, end + 8);  // an end mark that the next call overwrites
    write(*sink, noise, 0, 500);
    sink->publish(end + 8, stop_);
    begin = end;
  }
  write(*sink, data, 0, 500);
  write(*sink, data, 7 * kPart - 8, 7 * kPart);
  sink->publish(7 * kPart, stop_);
  sink->finish(stop_);
  EXPECT_TRUE(same(store_.object, data));
}

TEST_F(MultipartSinkTest, RelocatingMovesEverythingBehindTheHeadAlsoWhatWasSent) {
  for (uint64_t head : {uint64_t{1000}, kPart - 1, kPart, kPart + 1, 2 * kPart + 300}) {
    for (uint64_t shift : {uint64_t{4096}, kPart, 3 * kPart}) {
      store_.parts.clear();
      store_.object.clear();
      const uint64_t payload = 6 * kPart;
      const Bytes data = random_bytes(head + payload);
      auto sink = make();
      sink->reserve_head(head);
      sink->reserve(data.size());
      write(*sink, data, head, data.size());
      write(*sink, data, 0, head);
      sink->publish(data.size(), stop_);
      sink->relocate(head, payload, head + shift, stop_);
      const Bytes more = random_bytes(2 * kPart, 3);
      Bytes expected = random_bytes(head + shift, 4);
      expected.insert(expected.end(), data.begin() + static_cast<ptrdiff_t>(head), data.end());
      expected.insert(expected.end(), more.begin(), more.end());
      write(*sink, expected, 0, head + shift);
      sink->publish(expected.size() - more.size(), stop_);
      sink->reserve_head(head + shift);
      sink->reserve(expected.size());
      write(*sink, expected, expected.size() - more.size(), expected.size());
      sink->publish(expected.size(), stop_);
      sink->finish(stop_);
      EXPECT_TRUE(store_.object == expected) << head << " " << shift;
    }
  }
}

TEST_F(MultipartSinkTest, AByteThatWasNeverWrittenIsAnErrorAndAborts) {
  const Bytes data = random_bytes(5 * kPart);
  auto sink = make();
  sink->reserve(data.size());
  write(*sink, data, 0, kPart + 100);
  write(*sink, data, kPart + 101, data.size());
  sink->publish(data.size(), stop_);
  try {
    sink->finish(stop_);
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what())
                  .find("byte " + std::to_string(kPart + 100) + " was never written"),
              std::string::npos)
        << error.what();
  }
  expect_nothing_stored(store_.created);
}

TEST_F(MultipartSinkTest, AFailedPartFailsWritersAndFinishAndAbortsOnce) {
  const Bytes data = random_bytes(20 * kPart);
  store_.fail_part = 4;
  auto sink = make(3, 4 * kPart);
  sink->reserve(data.size());
  EXPECT_THROW(
      {
        for (uint64_t at = 0; at < data.size(); at += kPart) write(*sink, data, at, at + kPart);
        sink->publish(data.size(), stop_);
        sink->finish(stop_);
      },
      Error);
  EXPECT_THROW(sink->finish(stop_), Error);
  sink.reset();
  expect_nothing_stored(store_.created);
}

TEST_F(MultipartSinkTest, AFailedCreateOrCompleteStoresNothing) {
  const Bytes data = random_bytes(5 * kPart);
  for (bool create : {true, false}) {
    store_.fail_create = create;
    store_.fail_complete = !create;
    auto sink = make();
    sink->reserve(data.size());
    EXPECT_THROW(
        {
          write(*sink, data, 0, data.size());
          sink->publish(data.size(), stop_);
          sink->finish(stop_);
        },
        Error);
    expect_nothing_stored(create ? 0 : store_.created);
    store_.created = store_.aborted = 0;
  }
}

TEST_F(MultipartSinkTest, WithoutFinishNothingIsStored) {
  const Bytes data = random_bytes(8 * kPart);
  {
    auto sink = make();
    sink->reserve(data.size());
    write(*sink, data, 0, data.size());
    sink->publish(data.size(), stop_);
  }
  EXPECT_FALSE(store_.has_object);
  EXPECT_EQ(store_.aborted, store_.created);
}

TEST_F(MultipartSinkTest, FinishWithoutAPublishedCallStoresNothing) {
  const Bytes data = random_bytes(8 * kPart);
  auto sink = make();
  sink->reserve(data.size());
  write(*sink, data, 0, data.size());
  sink->finish(stop_);
  EXPECT_FALSE(store_.has_object);
  EXPECT_EQ(store_.aborted, store_.created);
}

TEST_F(MultipartSinkTest, RolledBackBytesAbortTheUpload) {
  const Bytes data = random_bytes(8 * kPart);
  auto sink = make();
  sink->reserve(data.size());
  sink->rollback(0);  // nothing was written: no harm
  write(*sink, data, 0, 4 * kPart);
  sink->publish(4 * kPart, stop_);
  sink->rollback(4 * kPart);
  write(*sink, data, 4 * kPart, 6 * kPart);
  sink->rollback(4 * kPart);
  EXPECT_THROW(write(*sink, data, 0, 1), Error);
  EXPECT_THROW(sink->finish(stop_), Error);
  EXPECT_FALSE(store_.has_object);
  EXPECT_EQ(store_.aborted, store_.created);
}

TEST_F(MultipartSinkTest, AStopEndsWaitingWritersAndFinish) {
  const Bytes data = random_bytes(20 * kPart);
  for (bool finishing : {false, true}) {
    store_.hang = true;
    auto sink = make(2, finishing ? 0 : 4 * kPart);
    sink->reserve(data.size());
    std::stop_source source;
    std::thread later([&] {
      for (int i = 0; i < 30'000 && !store_.is_uploading(); ++i)
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      source.request_stop();
    });
    const uint64_t end = finishing ? 8 * kPart : data.size();
    try {
      sink->write_at(0, ConstBuffer(data).first(end), source.get_token());
      sink->publish(end, stop_);
      sink->finish(source.get_token());
      FAIL();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Errc::cancelled);
    }
    later.join();
    sink->abandon();
    sink->abandon();
    EXPECT_FALSE(store_.has_object);
    EXPECT_EQ(store_.aborted, 1);
    store_.aborted = 0;
  }
}

TEST_F(MultipartSinkTest, WithoutAnyThreadTheWriterUploads) {
  const testing::NoThreads none;
  const Bytes data = random_bytes(9 * kPart + 77);
  {
    auto sink = make(3, 4 * kPart);
    sink->reserve(data.size());
    for (uint64_t at = 0; at < data.size(); at += 50'000)
      write(*sink, data, at, std::min<uint64_t>(at + 50'000, data.size()));
    EXPECT_LE(sink->peak_nbytes(), 5 * kPart);
    sink->publish(data.size(), stop_);
    sink->finish(stop_);
  }
  EXPECT_TRUE(same(store_.object, data));
  EXPECT_EQ(store_.most_running, 1);
  store_.has_object = false;
  store_.completed = store_.created = 0;
  store_.fail_part = 3;
  auto failing = make(3, 4 * kPart);
  failing->reserve(data.size());
  EXPECT_THROW(write(*failing, data, 0, data.size()), Error);
  failing.reset();
  expect_nothing_stored(1);
}

TEST_F(MultipartSinkTest, AnObjectAboveTheStoresLimitIsRefusedBeforeAnythingIsSent) {
  auto sink = make();
  EXPECT_THROW(sink->reserve(kMaxObjectNbytes + 1), Error);
  sink.reset();
  expect_nothing_stored(0);
}

}  // namespace
}  // namespace tensorizer::io
