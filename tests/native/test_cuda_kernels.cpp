// Chunks that the device opens: from a copier's buffer through the kernels, run by the fake driver,
// to the destination; and what happens where the kernels cannot be had.
#include <sodium.h>

#include "crypto_oracle.h"
#include "device/cuda/context_guard.h"
#include "device/cuda/cuda_device.h"
#include "device_harness.h"
#include "load/device_cipher.h"
#include "session_harness.h"

namespace tensorizer::device::cuda::tests {
namespace {

using crypto::testing::Message;

constexpr size_t kChunk = 128 << 10;
constexpr size_t kBuffer = 4 * kChunk;

class CudaKernels : public FakeDriverTest {
 protected:
  void SetUp() override {
    FakeDriverTest::SetUp();
    begin_untested();
    for (uint64_t i = 0; i < 12; ++i) messages_.emplace_back(i == 11 ? 70'001 : kChunk, i + 1);
  }

  static CudaCopyOptions options(OpenOnDevice open = OpenOnDevice::always) {
    CudaCopyOptions made;
    made.pinned = {3, kBuffer, std::chrono::milliseconds(60'000)};
    made.open_on_device = open;
    return made;
  }

  // Three workers bring the messages, four in a buffer, to `memory_`.
  void load(CopyEngine& engine) {
    for_each_index(messages_.size() / 4, 3, {}, [&](size_t group, const std::stop_token& stop) {
      const size_t first = 4 * group;
      const std::unique_ptr<Copier> copier = engine.make_copier(true);
      const std::span<std::byte> buffer = next_buffer(*copier, stop, [] {});
      const std::span<ChunkToOpen> chunks = copier->chunks_to_open({});
      for (const ChunkToOpen& chunk : chunks.first(4))
        if (chunk.nbytes != 0) left_behind_ = true;
      size_t nbytes = 0;
      for (size_t i = 0; i < 4; ++i) {
        describe(chunks[i], first + i);
        const Message& message = messages_[first + i];
        std::memcpy(buffer.data() + i * kChunk, message.cipher.data(), message.cipher.size());
        nbytes = i * kChunk + message.cipher.size();
      }
      const CopyPiece piece{0, memory_.data() + first * kChunk, nbytes};
      const auto refuse = [first](size_t chunk) {
        throw Error(Errc::crypto, "message " + std::to_string(first + chunk));
      };
      copier->send_to_open({&piece, 1}, 4, refuse, stop);
      copier->finish(stop);
    });
  }

  std::string error_of_load(Errc code) {
    CudaCopyEngine engine(options());
    return testing::expect_error(code, [&] { load(engine); });
  }

  void expect_loads() {
    fake().write(memory_.data(), Bytes(memory_.size(), std::byte{0x5A}).data(), memory_.size());
    CudaCopyEngine engine(options());
    EXPECT_EQ(engine.why_not_opened({}), "");
    load(engine);
    for (size_t i = 0; i < messages_.size(); ++i) EXPECT_TRUE(holds(i, messages_[i].plain)) << i;
    EXPECT_FALSE(left_behind_) << "a chunk's description was left in pinned memory";
  }

  bool holds(size_t i, const std::vector<uint8_t>& bytes) const {
    const Bytes found = memory_.bytes();
    return std::memcmp(found.data() + i * kChunk, bytes.data(), bytes.size()) == 0;
  }

  std::vector<Message> messages_;
  DeviceMemory memory_{12 * kChunk};
  std::atomic<bool> left_behind_{false};

  // The kernels on one stream and what they read on another, which nothing orders before them.
  void enqueue_before_copies() const {
    const CudaCopyEngine engine(options(OpenOnDevice::never));  // keeps the context
    const Driver& driver = Device::get(0).driver();
    const ContextGuard current(driver, Device::get(0).context());
    const Kernels kernels(driver, Device::get(0).kernels_tested(), 1, kBuffer);
    Stream copies = nullptr;
    Stream work = nullptr;
    static_cast<void>(driver.cuStreamCreate(&copies, kStreamNonBlocking));
    static_cast<void>(driver.cuStreamCreate(&work, kStreamNonBlocking));
    describe(kernels.chunks(0)[0], 0);
    const auto copy = [&](std::span<const Copy> tables) {
      for (const Copy& table : tables)
        static_cast<void>(driver.cuMemcpyHtoDAsync(table.device, table.host, table.nbytes, copies));
    };
    kernels.enqueue(work, 0, 1, copy);
    static_cast<void>(driver.cuStreamSynchronize(work));
  }

  void describe(ChunkToOpen& chunk, size_t i) const {
    const Message& message = messages_[i];
    load::describe_chunk(chunk, memory_.data() + i * kChunk, message.cipher.size(),
                         std::as_bytes(std::span(message.mac)).first<kMacNbytes>(),
                         std::as_bytes(std::span(message.nonce)).first<kNonceNbytes>(),
                         crypto::SecretKey(std::as_bytes(std::span(message.key))));
  }
};

// The fake driver looks, when it is given memory of the kernels back, whether all of it is zero.
TEST_F(CudaKernels, OpenWhatACopierSends) {
  fake().set_delay(0, 2000);
  expect_loads();
  EXPECT_EQ(fake().calls("cuModuleLoadData"), 1U);
  EXPECT_EQ(fake().calls("cuLaunchKernel"), 2U + 2U * 3U);  // the self-test, then two for a buffer
  expect_loads();
  EXPECT_EQ(fake().calls("cuModuleLoadData"), 1U);
}

// A table in a call of its own would wait behind the copies of the other streams, and so would the
// kernels.
TEST_F(CudaKernels, GetTheirTableInTheCallThatBringsTheCiphertext) {
  expect_loads();
  fake().reset();
  expect_loads();
  EXPECT_EQ(fake().calls("cuMemcpyBatchAsync"), 3U);  // a buffer each
  EXPECT_EQ(fake().calls("cuMemcpyHtoDAsync"), 0U);
}

TEST_F(CudaKernels, RefuseAForgedChunkByItsNumberAndLeaveItsCiphertext) {
  for (const size_t forged : {0, 5, 11}) {
    messages_[forged].cipher[3] ^= 1;
    EXPECT_EQ(error_of_load(Errc::crypto), "message " + std::to_string(forged));
    EXPECT_TRUE(holds(forged, messages_[forged].cipher));
    EXPECT_FALSE(holds(forged, messages_[forged].plain));
    messages_[forged].cipher[3] ^= 1;
    expect_loads();
  }
}

TEST_F(CudaKernels, LeaveNothingWhereTheDriverFailsInTheMiddle) {
  for (const char* call : {"cuMemcpyBatchAsync:2:700", "cuLaunchKernel:3:1", "cuLaunchKernel:4:1",
                           "cuMemcpyDtoHAsync:3:1", "cuMemsetD8Async:3:1", "cuEventRecord:2:1"}) {
    fake().reset();
    fake().fail(call);
    static_cast<void>(error_of_load(Errc::device));
    fake().reset();
    expect_loads();
    EXPECT_TRUE(release_pinned(0)) << call;
  }
}

TEST_F(CudaKernels, AreDoneWithoutWhereTheyCannotBeHad) {
  for (const char* call :
       {"cuModuleLoadData:1:218", "cuModuleLoadData:1:222", "cuModuleGetFunction:2:500",
        "cuMemAlloc:1:2", "cuMemAlloc:2:2", "cuLaunchKernel:1:1", "cuLaunchKernel:2:1"}) {
    fake().reset();
    begin_untested();
    fake().fail(call);
    {
      CudaCopyEngine engine(options(OpenOnDevice::if_possible));
      EXPECT_NE(engine.why_not_opened({}), "") << call;
      const std::unique_ptr<Copier> copier = engine.make_copier(true);
      ASSERT_FALSE(copier->try_acquire().empty());
      EXPECT_TRUE(copier->chunks_to_open({}).empty()) << call;
      // nor are they asked for again
      const std::string what = error_of_load(Errc::device);
      EXPECT_NE(what.find("cannot decrypt: " + engine.why_not_opened({})), std::string::npos)
          << what;
    }
    EXPECT_EQ(fake().calls("cuModuleLoadData"), 1U);
    EXPECT_TRUE(release_pinned(0)) << call;
    expect_loads();
    EXPECT_TRUE(release_pinned(0)) << call;
  }
}

TEST_F(CudaKernels, AreNotUsedWhereTheyComputeSomethingElse) {
  fake().break_kernels(1);
  for (const unsigned loaded : {1U, 0U}) {  // not again where it was found before
    fake().reset();
    {
      CudaCopyEngine engine(options(OpenOnDevice::if_possible));
      EXPECT_NE(engine.why_not_opened({}).find("when they were tested"), std::string::npos);
      EXPECT_EQ(engine.found_wrong(), "CUDA device 0: " + engine.why_not_opened({}));
      EXPECT_EQ(fake().calls("cuModuleLoadData"), loaded);
    }
    EXPECT_TRUE(release_pinned(0));
    fake().break_kernels(0);
  }
}

TEST_F(CudaKernels, AreTestedOnceThoughPinnedMemoryIsMadeAgain) {
  for (const unsigned launched_by_the_test : {2U, 0U}) {
    fake().reset();
    expect_loads();
    EXPECT_EQ(fake().calls("cuModuleLoadData"), 1U);
    EXPECT_EQ(fake().calls("cuLaunchKernel"), launched_by_the_test + 2U * 3U);
    EXPECT_TRUE(release_pinned(0));
  }
}

TEST_F(CudaKernels, ThatDoNotRunAreAnErrorAndNotAGenuineChunk) {
  expect_loads();
  fake().break_kernels(1);
  EXPECT_NE(error_of_load(Errc::device).find("did not run"), std::string::npos);
  fake().break_kernels(0);
  expect_loads();
}

#if !defined(TENSORIZER_TSAN)
TEST_F(CudaKernels, BeforeTheirCopyTheFakeDriverWouldNotice) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_DEATH(enqueue_before_copies(), "nothing orders them");
}
#endif

TEST_F(CudaKernels, AreNotLoadedWhereNobodyAskedForThem) {
  CudaCopyEngine engine(options(OpenOnDevice::never));
  EXPECT_EQ(fake().calls("cuModuleLoadData"), 0U);
  EXPECT_EQ(engine.why_not_opened({}), "it was not asked for");
}

// --- whole loads of encrypted files --------------------------------------------------------------

class CudaKernelsLoad : public FakeDriverTest {
 protected:
  static constexpr size_t kCipherChunk = 2 << 20;

  void SetUp() override {
    FakeDriverTest::SetUp();
    begin_untested();
    file_ = tensorizer::tests::save_all(
        tensors_, {.hashes = {false, true}, .key = tensorizer::tests::test_key()});
    for (const auto& tensor : tensors_) {
      memory_.push_back(std::make_unique<DeviceMemory>(tensor.data.size()));
      memory_.back()->fill(Bytes(tensor.data.size(), std::byte{0x5A}));
    }
  }

  void load(OpenOnDevice open, unsigned workers = 2) {
    CudaCopyOptions options;
    options.pinned = {4, kCipherChunk, std::chrono::milliseconds(60'000)};
    options.open_on_device = open;
    CudaCopyEngine engine(options);
    tensorizer::tests::PlainSource source(file_);
    load::KeyRing keys(tensorizer::tests::test_key());
    const auto opened = tensorizer::tests::open_all(source, &keys);
    std::vector<load::LoadTarget> targets;
    for (uint32_t i = 0; i < memory_.size(); ++i)
      targets.push_back(
          {.entry = i, .destination = {memory_[i]->data(), memory_[i]->size(), nullptr}});
    load::LoadSession session(source, opened, targets,
                              {.max_workers = workers, .keys = &keys, .engine = &engine});
    tensorizer::tests::run_load(session);
  }

  void expect_loaded() const {
    for (size_t i = 0; i < memory_.size(); ++i)
      EXPECT_TRUE(same(memory_[i]->bytes(), tensors_[i].data)) << i;
  }

  // Chunks on the host and on the device; several of a tensor; odd ends.
  std::vector<tensorizer::tests::Tensor> tensors_ = tensorizer::tests::make_tensors(
      {3 * kCipherChunk + 100'001, 1000, 2 * kCipherChunk, 65'536, 65'535, 77, 300'000}, 21);
  Bytes file_;
  std::vector<std::unique_ptr<DeviceMemory>> memory_;
};

TEST_F(CudaKernelsLoad, GivesTheBytesThatTheHostPathGives) {
  fake().set_delay(0, 1000);
  for (const OpenOnDevice open : {OpenOnDevice::always, OpenOnDevice::never}) {
    for (const auto& memory : memory_) memory->fill(Bytes(memory->size(), std::byte{0x5A}));
    load(open);
    expect_loaded();
    EXPECT_EQ(fake().calls("cuLaunchKernel") > 2, open == OpenOnDevice::always);
    fake().reset();
  }
}

TEST_F(CudaKernelsLoad, RefusesAForgedChunkInTheWordsOfTheHostPathAndWipesTheDestinations) {
  const Bytes right = file_;
  for (const size_t from_end : {100, 400'000, 3'000'000, 5'000'000}) {
    file_ = right;
    file_[file_.size() - from_end] ^= std::byte{1};
    const std::string by_host =
        testing::expect_error(Errc::crypto, [&] { load(OpenOnDevice::never, 1); });
    for (const auto& memory : memory_) memory->fill(Bytes(memory->size(), std::byte{0x5A}));
    EXPECT_EQ(testing::expect_error(Errc::crypto, [&] { load(OpenOnDevice::always, 1); }), by_host);
    for (const auto& memory : memory_) {  // zeros, or where nothing had arrived what was there
      EXPECT_TRUE(testing::only_holds(memory->bytes(), std::byte{0}, std::byte{0x5A})) << from_end;
    }
    EXPECT_EQ(memory_[0]->bytes()[0], std::byte{0});
  }
  file_ = right;
  load(OpenOnDevice::always);
  expect_loaded();
}

}  // namespace
}  // namespace tensorizer::device::cuda::tests
