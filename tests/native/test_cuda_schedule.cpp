// How loads and saves keep a device busy, and what must hold meanwhile: the whole path from a file
// to the fake driver, which ends the process where copies and the caller's work are not ordered, or
// a buffer is changed under its copies.
#include <gtest/gtest.h>

#include <chrono>

#include "fake_driver.h"
#include "load/concurrent_loads.h"
#include "session_harness.h"

namespace tensorizer::device::cuda::tests {
namespace {

using namespace std::chrono_literals;
using tensorizer::tests::Bytes;
using tensorizer::tests::make_tensors;
using tensorizer::tests::PlainSource;
using tensorizer::tests::Tensor;
using tensorizer::tests::test_key;
using testing::same;

constexpr size_t kMib = 1 << 20;
constexpr std::byte kFormer{0x5A};

// Waits for what other threads do; a test fails where it does not come within a minute.
class Awaited {
 public:
  unsigned count() {
    MutexLock lock(mutex_);
    changed_.notify_all();
    return ++count_;
  }
  bool reaches(unsigned wanted) {
    MutexLock lock(mutex_);
    const auto deadline = std::chrono::steady_clock::now() + 1min;
    return changed_.wait_until(mutex_, {}, deadline,
                               [&]() REQUIRES_LOCK(mutex_) { return count_ >= wanted; });
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  unsigned count_ GUARDED_BY(mutex_) = 0;
};

// Forwards to the real engine, except that nothing is ordered after the caller's work any more.
class Unordered final : public CopyEngine {
 public:
  explicit Unordered(CopyEngine& engine) : engine_(engine) {}
  uint64_t buffer_nbytes() const noexcept override { return engine_.buffer_nbytes(); }
  bool is_ready() const noexcept override { return engine_.is_ready(); }
  void order_after_caller() override {}
  std::unique_ptr<Copier> make_copier(bool secret) override { return engine_.make_copier(secret); }
  void wipe(std::span<const DeviceRange> destinations) noexcept override {
    engine_.wipe(destinations);
  }

 private:
  CopyEngine& engine_;
};

// Forwards to the real engine, whose copiers are watched: it counts how often one waited for all of
// its copies. It may also make a mistake.
class Watched final : public CopyEngine {
 public:
  explicit Watched(CopyEngine& engine) : engine_(engine) {}
  uint64_t buffer_nbytes() const noexcept override { return engine_.buffer_nbytes(); }
  bool is_ready() const noexcept override { return engine_.is_ready(); }
  void order_after_caller() override { engine_.order_after_caller(); }
  std::unique_ptr<Copier> make_copier(bool secret) override {
    return std::make_unique<WatchedCopier>(engine_.make_copier(secret), *this);
  }
  void wipe(std::span<const DeviceRange> destinations) noexcept override {
    engine_.wipe(destinations);
  }
  std::atomic<unsigned> finishes{0};
  bool uses_buffers_early = false;  // a buffer is filled again while its copies are under way

 private:
  class WatchedCopier final : public Copier {
   public:
    WatchedCopier(std::unique_ptr<Copier> copier, Watched& engine)
        : copier_(std::move(copier)), engine_(engine) {}
    std::span<std::byte> try_acquire() override {
      if (!engine_.uses_buffers_early || last_.empty()) last_ = copier_->try_acquire();
      return last_;
    }
    void wait(const std::stop_token& stop) override { copier_->wait(stop); }
    bool has_in_use() const noexcept override { return copier_->has_in_use(); }
    void give_back_unused() noexcept override { copier_->give_back_unused(); }
    void pass_fence(const std::stop_token& stop) override { copier_->pass_fence(stop); }
    void send(std::span<const CopyPiece> pieces, const std::stop_token& stop) override {
      copier_->send(pieces, stop);
    }
    void begin_fetch(std::span<const CopyPiece> pieces, const std::stop_token& stop) override {
      copier_->begin_fetch(pieces, stop);
    }
    void end_fetch(const std::stop_token& stop) override { copier_->end_fetch(stop); }
    void finish(const std::stop_token& stop) override {
      ++engine_.finishes;
      copier_->finish(stop);
    }

   private:
    const std::unique_ptr<Copier> copier_;
    Watched& engine_;
    std::span<std::byte> last_;
  };

  CopyEngine& engine_;
};

class CudaSchedule : public FakeDriverTest {
 protected:
  struct File {
    std::vector<Tensor> tensors;
    Bytes bytes;
    bool encrypted;
  };
  static File make_file(const std::vector<size_t>& sizes, bool encrypted, uint64_t seed = 3) {
    File file{make_tensors(sizes, seed), {}, encrypted};
    file.bytes = tensorizer::tests::save_all(
        file.tensors, {.hashes = {!encrypted, true}, .key = encrypted ? test_key() : nullptr});
    return file;
  }

  // One load of all tensors of a file, to memory that it allocates while it runs.
  struct Load {
    Load(const File& from, CopyEngine& to, int device = 0, bool verify = false,
         unsigned workers = 0)
        : file(from),
          source(from.bytes),
          keys(from.encrypted ? std::make_shared<load::KeyRing>(test_key()) : nullptr),
          device_(device),
          engine_(to),
          verify_(verify),
          workers_(workers) {}

    load::LoadSession& session() {
      if (session_) return *session_;
      const auto opened = tensorizer::tests::open_all(source, keys.get());
      std::vector<load::LoadTarget> targets;
      for (uint32_t i = 0; i < opened->index.size(); ++i) targets.push_back({.entry = i});
      auto groups = load::group_memory(*opened, false, {nullptr, 512}, targets);
      session_ = std::make_unique<load::LoadSession>(
          source, opened, std::move(targets),
          load::LoadOptions{
              .verify = verify_, .max_workers = workers_, .keys = keys.get(), .engine = &engine_});
      session_->allocate_while_it_runs(
          std::move(groups), {[this](uint64_t nbytes, bool) -> TensorMemory {
                                if (before_allocation) before_allocation(memory.size());
                                memory.push_back(std::make_unique<DeviceMemory>(nbytes, device_));
                                // Work of whoever had the memory before, still to come.
                                fake().compute(nullptr, device_, memory.back()->data(), nbytes,
                                               static_cast<int>(kFormer), 500);
                                return {memory.back()->data(), nbytes, nullptr};
                              },
                              512});
      return *session_;
    }
    void run() { run_all({this}); }

    void expect_loaded() {
      for (size_t i = 0; i < file.tensors.size(); ++i) {
        const TensorMemory& at = session().targets[i].destination;
        Bytes found(file.tensors[i].data.size());
        if (!found.empty()) fake().read(at.data, found.data(), found.size());
        EXPECT_TRUE(same(found, file.tensors[i].data)) << i;
      }
    }

    const File& file;
    PlainSource source;
    std::shared_ptr<load::KeyRing> keys;
    std::function<void(size_t)> before_allocation;  // with the number of allocations so far
    std::vector<std::unique_ptr<DeviceMemory>> memory;

   private:
    int device_;
    CopyEngine& engine_;
    bool verify_;
    unsigned workers_;
    std::unique_ptr<load::LoadSession> session_;
  };

  static void run_all(const std::vector<Load*>& loads) {
    std::vector<load::LoadSession*> sessions;
    for (Load* load : loads) sessions.push_back(&load->session());
    load::run_loads(sessions, 2, {}, {});
  }

  static CudaCopyOptions ring(unsigned slots, uint64_t nbytes = 2 * kMib, int device = 0) {
    CudaCopyOptions options;
    options.device = device;
    options.pinned = {slots, nbytes, 60'000ms};
    return options;
  }
  static unsigned copies() {
    return fake().calls("cuMemcpyHtoDAsync") + fake().calls("cuMemcpyBatchAsync");
  }

  const std::vector<size_t> kSizes{9 * kMib + 5, 1000, 0, 8 * kMib, 77, 12 * kMib, 3 * kMib};
};

// --- destinations
// ---------------------------------------------------------------------------------

TEST_F(CudaSchedule, CopiesBeginBeforeTheLastDestinationIsAllocated) {
  const File file = make_file(kSizes, false);
  CudaCopyEngine engine(ring(4));
  Load load(file, engine);
  load.before_allocation = [](size_t so_far) {
    if (so_far < 3)
      return std::this_thread::sleep_for(10ms);  // longer than a look at signals waits
    const auto deadline = std::chrono::steady_clock::now() + 1min;
    while (copies() == 0 && std::chrono::steady_clock::now() < deadline)
      std::this_thread::sleep_for(1ms);
    EXPECT_GT(copies(), 0U);
  };
  load.run();
  load.expect_loaded();
}

TEST_F(CudaSchedule, MemoryAllocatedDuringALoadIsWrittenAfterItsFormerUse) {
  fake().set_delay(0, 300);
  for (const bool encrypted : {false, true}) {
    const File file = make_file(kSizes, encrypted);
    CudaCopyEngine engine(ring(3));
    Load load(file, engine);
    load.run();
    load.expect_loaded();
  }
}

#if !defined(TENSORIZER_TSAN)
TEST_F(CudaSchedule, WithoutAFenceTheFakeDriverWouldNotice) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_DEATH(
      {
        const File file = make_file(kSizes, false);
        CudaCopyEngine engine(ring(3));
        Unordered unordered(engine);
        Load load(file, unordered);
        load.run();
      },
      "nothing orders them");
}

TEST_F(CudaSchedule, ABufferThatIsUsedEarlyTheFakeDriverWouldNotice) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_DEATH(
      {
        fake().set_delay(2000, 4000);
        const File file = make_file({40 * kMib}, false);
        CudaCopyEngine engine(ring(3));
        Watched watched(engine);
        watched.uses_buffers_early = true;
        Load load(file, watched, 0, false, 1);
        load.run();
      },
      "was changed");
}
#endif

// What allocates is the thread that waits for the load, with a lock that workers may need.
TEST_F(CudaSchedule, AllocatingWaitsForNoWorker) {
  const File file = make_file(kSizes, false);
  CudaCopyEngine engine(ring(2));
  Load load(file, engine);
  load.session();
  Awaited allocated;
  load.source.before_read = [&] { EXPECT_TRUE(allocated.reaches(4)); };
  load.before_allocation = [&](size_t) { allocated.count(); };
  load.run();
  load.expect_loaded();
}

TEST_F(CudaSchedule, AnAllocationThatFailsIsTheErrorAndTheNextLoadWorks) {
  const File file = make_file(kSizes, true);
  CudaCopyEngine engine(ring(3));
  for (const size_t nth : {0, 1, 3}) {
    {
      Load load(file, engine);
      load.before_allocation = [&](size_t so_far) {
        if (so_far == nth) throw std::runtime_error("no memory left");
      };
      try {
        load.run();
        ADD_FAILURE() << "nothing was thrown";
      } catch (const std::runtime_error& error) {
        EXPECT_STREQ(error.what(), "no memory left");
      }
      EXPECT_EQ(Device::get(0).status().free_slots, Device::get(0).status().slots);
      fake().wait(nullptr, 0);
    }  // its memory goes: the driver looks whether anything still uses it
    Load load(file, engine);
    load.run();
    load.expect_loaded();
  }
}

// --- sources that wait ---------------------------------------------------------------------------

TEST_F(CudaSchedule, MoreRequestsAreUnderWayThanThereAreBuffers) {
  const File file = make_file({40 * kMib}, false);
  CudaCopyEngine engine(ring(2));
  Load load(file, engine);
  load.source.settings = {.concurrency = 8, .unit_nbytes = 2 * kMib, .remote = true};
  load.session();
  Awaited requests;
  load.source.before_read = [&] {
    // In the second round too: whoever waits for the source keeps no buffer of its first.
    const unsigned number = requests.count();
    EXPECT_TRUE(requests.reaches(number <= 8 ? 8 : 16));
  };
  load.run();
  load.expect_loaded();
}

TEST_F(CudaSchedule, AnyMixOfLoadsEndsWithTheFewestBuffers) {
  fake().set_delay(0, 100);
  const File plain = make_file(kSizes, false, 4), sealed = make_file(kSizes, true, 5);
  CudaCopyEngine zero(ring(2)), one(ring(2, 2 * kMib, 1));
  for (const unsigned mix : {0U, 1U, 2U, 3U, 5U, 7U, 8U, 9U, 15U}) {
    const bool verify = mix & 1, remote = mix & 2, other_remote = mix & 4, in_memory = mix & 8;
    Load a(plain, zero, 0, verify), b(sealed, one, 1, verify), c(plain, one, 1, !verify),
        d(sealed, zero, 0);
    for (Load* load : {&a, &b})
      load->source.settings = {
          .concurrency = 6, .in_memory = in_memory && !remote, .remote = remote};
    for (Load* load : {&c, &d})
      load->source.settings = {.concurrency = 3, .in_memory = in_memory, .remote = other_remote};
    run_all({&a, &b, &c, &d});
    for (Load* load : {&a, &b, &c, &d}) load->expect_loaded();
    for (const int device : {0, 1}) {
      const PinnedStatus status = Device::get(device).status();
      EXPECT_EQ(status.free_slots, status.slots);
    }
  }
}

// --- several devices -----------------------------------------------------------------------------

TEST_F(CudaSchedule, TwoDevicesGetTheirCopiesAtTheSameTime) {
  const File first = make_file({30 * kMib}, false, 7), second = make_file({30 * kMib}, false, 8);
  CudaCopyEngine zero(ring(3)), one(ring(3, 2 * kMib, 1));
  Load a(first, zero), b(second, one, 1);
  a.session();
  b.session();
  std::atomic<unsigned> of_first{0}, of_second{0}, least_ahead{0};
  a.source.before_read = [&] { ++of_first; };
  b.source.before_read = [&] {
    ++of_second;
    least_ahead = std::max(least_ahead.load(), of_second > of_first ? of_second - of_first : 0U);
  };
  run_all({&a, &b});
  a.expect_loaded();
  b.expect_loaded();
  EXPECT_LE(least_ahead, 6U) << "one device was served after the other";
}

// Each copier finishes once, at the end: who waits for copies of his own to one device leaves those
// to the other on their way.
TEST_F(CudaSchedule, WaitingForCopiesToOneDeviceDoesNotEmptyTheQueueOfTheOther) {
  fake().set_delay(200, 400);
  const File first = make_file({40 * kMib}, false, 7), second = make_file({40 * kMib}, false, 8);
  CudaCopyEngine zero(ring(4)), one(ring(4, 2 * kMib, 1));
  Watched to_zero(zero), to_one(one);
  Load a(first, to_zero, 0, false, 1), b(second, to_one, 1, false, 1);
  run_all({&a, &b});
  a.expect_loaded();
  b.expect_loaded();
  EXPECT_EQ(to_zero.finishes, 1U);
  EXPECT_EQ(to_one.finishes, 1U);
}

TEST_F(CudaSchedule, TheFirstFailureStopsAllAndNamesItsTensor) {
  File good = make_file({20 * kMib}, true, 9), bad = make_file({20 * kMib}, true, 10);
  bad.bytes[bad.bytes.size() - 100] ^= std::byte{1};
  CudaCopyEngine zero(ring(2)), one(ring(2, 2 * kMib, 1));
  Load a(good, zero), b(bad, one, 1);
  const std::string what = testing::expect_error(Errc::crypto, [&] { run_all({&a, &b}); });
  EXPECT_NE(what.find("does not match its authentication code"), std::string::npos) << what;
  for (const Load* load : {&a, &b}) {
    for (const auto& memory : load->memory) {
      // Zeros, or where nothing had arrived what was there.
      EXPECT_TRUE(testing::only_holds(memory->bytes(), std::byte{0}, kFormer));
    }
  }
}

// --- units that are hashed -----------------------------------------------------------------------

TEST_F(CudaSchedule, UnitsThatAreHashedAreShortAndShareBuffers) {
  if (digest::Sha256::lanes() < 8) GTEST_SKIP() << "few streams are hashed side by side here";
  const File file = make_file(std::vector<size_t>(20, 3 * kMib), false);
  CudaCopyEngine engine(ring(6, 8 * kMib));
  Load load(file, engine, 0, true, 2);
  load.source.settings = {.concurrency = 2, .in_memory = true};
  load.session();
  std::atomic<unsigned> reads{0};
  load.source.before_read = [&] { ++reads; };
  load.run();
  load.expect_loaded();
  EXPECT_GE(reads, 60U) << "units of more than a MiB";
  EXPECT_LE(copies(), 12U) << "buffers that were not filled";
}

TEST_F(CudaSchedule, AWrongByteInASharedBufferIsFoundAndNamed) {
  File file = make_file(std::vector<size_t>(20, 3 * kMib), false);
  file.bytes[file.bytes.size() / 2 + kMib] ^= std::byte{1};
  CudaCopyEngine engine(ring(6, 8 * kMib));
  Load load(file, engine, 0, true, 2);
  load.source.settings = {.concurrency = 2, .in_memory = true};
  const std::string what = testing::expect_error(Errc::hash_mismatch, [&] { load.run(); });
  EXPECT_NE(what.find(file.tensors[10].name), std::string::npos) << what;
  EXPECT_EQ(Device::get(0).status().free_slots, Device::get(0).status().slots);
}

TEST_F(CudaSchedule, AForgedChunkBesideGenuineOnesInASharedBufferLeavesNothing) {
  File file = make_file(std::vector<size_t>(6, 5 * kMib), true);
  file.bytes[file.bytes.size() - 100] ^= std::byte{1};
  CudaCopyEngine engine(ring(6, 8 * kMib));
  Load load(file, engine, 0, true, 2);
  load.source.settings = {.concurrency = 2, .in_memory = true};
  testing::expect_error(Errc::crypto, [&] { load.run(); });
  for (const auto& memory : load.memory)
    EXPECT_TRUE(testing::only_holds(memory->bytes(), std::byte{0}, kFormer));
}

// --- encrypted files -----------------------------------------------------------------------------

TEST_F(CudaSchedule, EncryptedUnitsFillTheirBuffers) {
  const File file = make_file({32 * kMib}, true);
  CudaCopyEngine engine(ring(3, 8 * kMib));
  Load load(file, engine);
  load.run();
  load.expect_loaded();
  EXPECT_LE(copies(), 5U);
}

TEST_F(CudaSchedule, TheMasterKeyNeverLeavesTheHost) {
  const auto key = test_key();
  fake().forbid(key->bytes().data(), 16);
  const File file = make_file({5 * kMib + 3}, true);
  CudaCopyOptions options = ring(3);
  options.open_on_device = OpenOnDevice::always;
  CudaCopyEngine engine(options);
  Load load(file, engine);
  load.run();
  load.expect_loaded();
  EXPECT_GT(fake().calls("cuLaunchKernel"), 2U);
  fake().forbid(nullptr, 0);
}

TEST_F(CudaSchedule, UntilTheKernelsAreCompiledTheHostDecrypts) {
  const File file = make_file({5 * kMib}, true);
  CudaCopyOptions options = ring(3);
  options.open_on_device = OpenOnDevice::if_possible;
  CudaCopyEngine engine(options);
  fake().model("gbps=100,jit_ms=500");
  Load load(file, engine);
  load.run();
  load.expect_loaded();
  EXPECT_LE(fake().calls("cuLaunchKernel"), 2U) << "more than the self-test";
  EXPECT_EQ(engine.why_not_opened({}), "");
  fake().model("");
  Load again(file, engine);
  again.run();
  again.expect_loaded();
  EXPECT_GT(fake().calls("cuLaunchKernel"), 2U);
}

TEST_F(CudaSchedule, AStopEndsALoadThatWaitsForTheKernels) {
  const File file = make_file({5 * kMib}, true);
  CudaCopyOptions options = ring(3);
  options.open_on_device = OpenOnDevice::always;
  CudaCopyEngine engine(options);
  fake().model("gbps=100,jit_ms=3000");
  Load load(file, engine);
  load::LoadSession* session = &load.session();
  std::stop_source stop;
  std::jthread stopper([&] {
    std::this_thread::sleep_for(50ms);
    stop.request_stop();
  });
  testing::expect_error(Errc::cancelled,
                        [&] { load::run_loads({&session, 1}, 1, {}, stop.get_token()); });
  EXPECT_EQ(copies(), 0U);
  fake().wait(nullptr, 0);
  EXPECT_NE(engine.why_not_opened({}), "x");  // the kernels are there before the model goes
  fake().model("");
}

// --- stops and failures --------------------------------------------------------------------------

// Where the device decrypts, the fake driver also looks whether all that it was told is zero again.
TEST_F(CudaSchedule, AfterAStopNothingIsEnqueuedAndNoBufferIsOwned) {
  for (const bool encrypted : {false, true}) {
    fake().reset();
    fake().set_delay(1000, 2000);
    const File file = make_file({60 * kMib}, encrypted);
    CudaCopyOptions options = ring(4);
    if (encrypted) options.open_on_device = OpenOnDevice::always;
    CudaCopyEngine engine(options);
    Load load(file, engine);
    load::LoadSession* session = &load.session();
    std::stop_source stop;
    std::atomic<unsigned> reads{0};
    load.source.before_read = [&] {
      if (++reads == 8) stop.request_stop();
    };
    testing::expect_error(Errc::cancelled,
                          [&] { load::run_loads({&session, 1}, 1, {}, stop.get_token()); });
    const unsigned enqueued = copies();
    EXPECT_EQ(Device::get(0).status().free_slots, Device::get(0).status().slots);
    std::this_thread::sleep_for(20ms);
    EXPECT_EQ(copies(), enqueued);
    EXPECT_TRUE(!encrypted || fake().calls("cuLaunchKernel") > 2) << "it was stopped too early";
    fake().wait(nullptr, 0);
  }
}

TEST_F(CudaSchedule, AStopEndsALoadWhoseMemoryIsBeingPinned) {
  fake().model("gbps=100,pin_us_per_mib=10000");  // 160 ms a step
  const File file = make_file({100 * kMib}, false);
  CudaCopyEngine engine(ring(40));
  Load load(file, engine);
  load::LoadSession* session = &load.session();
  std::stop_source stop;
  load.source.before_read = [&] { stop.request_stop(); };
  testing::expect_error(Errc::cancelled,
                        [&] { load::run_loads({&session, 1}, 1, {}, stop.get_token()); });
  // Two steps at once may have been under way.
  EXPECT_LE(Device::get(0).status().slots, 24U);
  fake().wait(nullptr, 0);
  fake().model("");
}

TEST_F(CudaSchedule, WhereverTheDriverFailsTheMemoryIsAtRestAfterwards) {
  const File file = make_file({9 * kMib, 4 * kMib, 100}, false);
  for (const std::string call : {"cuMemcpyHtoDAsync", "cuEventRecord", "cuEventQuery",
                                 "cuCtxPushCurrent", "cuStreamIsCapturing"}) {
    for (const char* nth : {":2", ":3", ":7"}) {
      CudaCopyEngine engine(ring(3));
      {
        Load load(file, engine);
        fake().fail((call + nth + ":999").c_str());
        try {
          load.run();
        } catch (const Error& error) {
          EXPECT_EQ(error.code(), Errc::device) << error.what();
        }
        fake().reset();
        EXPECT_EQ(Device::get(0).status().free_slots, Device::get(0).status().slots) << call;
        fake().wait(nullptr, 0);
      }
      Load load(file, engine);
      load.run();
      load.expect_loaded();
    }
  }
}

// --- saves ---------------------------------------------------------------------------------------

TEST_F(CudaSchedule, ASaveFetchesTheNextUnitWhileItWritesOne) {
  const std::vector<Tensor> tensors = make_tensors({40 * kMib}, 11);
  DeviceMemory memory(tensors[0].data.size());
  memory.fill(tensors[0].data);
  CudaCopyEngine engine(ring(6));
  auto sink = std::make_shared<tensorizer::tests::MemorySink>();
  std::atomic<unsigned> fetched_at_first_write{0};
  const auto fetches = [] {
    return fake().calls("cuMemcpyDtoHAsync") + fake().calls("cuMemcpyBatchAsync");
  };
  sink->before_write = [&](uint64_t) {
    unsigned none = 0;
    fetched_at_first_write.compare_exchange_strong(none, fetches());
  };
  save::SaveSession session(sink, 0, {.max_workers = 1});
  std::vector<save::TensorToWrite> plan{{.name = "t",
                                         .dtype = "|u1",
                                         .shape = {tensors[0].data.size()},
                                         .data_nbytes = tensors[0].data.size()}};
  const std::vector<format::TensorPath> paths{{"t"}};
  session.begin_call(std::move(plan), paths, {}, false, {});
  const std::vector<TensorMemory> payloads{{memory.data(), memory.size(), nullptr}};
  session.write_payloads(payloads, &engine, {});
  session.finish_call({});
  session.finish({});
  EXPECT_GE(fetched_at_first_write, 2U);
  PlainSource source(sink->published);
  std::vector<Bytes> found;
  tensorizer::tests::load_all(source, {}, found);
  EXPECT_TRUE(same(found[0], tensors[0].data));
}

}  // namespace
}  // namespace tensorizer::device::cuda::tests
