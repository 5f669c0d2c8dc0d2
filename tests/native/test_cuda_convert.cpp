// Tensors that the device converts on their way: the whole path from a file through staging memory
// and the kernel, run by the fake driver, to the destination; what stays there of encrypted files.
#include <algorithm>

#include "device/cuda/kernels/convert.h"
#include "device_harness.h"
#include "load/load_together.h"
#include "session_harness.h"

namespace tensorizer::device::cuda::tests {
namespace {

using tensorizer::tests::PlainSource;
using tensorizer::tests::Tensor;
using tensorizer::tests::test_key;

constexpr size_t kMib = 1 << 20;
constexpr std::byte kFormer{0x5A};

// Element after element, by nobody's kernel.
Bytes converted(const Bytes& stored, const load::Conversion& conversion) {
  const uint64_t from = load::Conversion::nbytes_of(conversion.from);
  const uint64_t to = load::Conversion::nbytes_of(conversion.to);
  Bytes result(conversion.converted(stored.size()));
  for (uint64_t i = 0; i < conversion.count(stored.size()); ++i) {
    const auto* const at = reinterpret_cast<const unsigned char*>(stored.data() + i * from);
    store_from_float32(reinterpret_cast<unsigned char*>(result.data() + i * to),
                       load_as_float32(at, conversion.from, false), conversion.to, false);
  }
  return result;
}

class CudaConvert : public FakeDriverTest {
 protected:
  void SetUp() override {
    FakeDriverTest::SetUp();
    begin_untested();
  }

  static CudaCopyOptions ring(OpenOnDevice open = OpenOnDevice::never) {
    CudaCopyOptions options;
    options.pinned = {4, 2 * kMib, std::chrono::milliseconds(60'000)};
    options.open_on_device = open;
    return options;
  }

  // Every tensor but each third is converted. Sizes are those of the stored bytes.
  struct Load {
    Load(std::vector<Tensor> of, const load::Conversion& by, bool is_encrypted)
        : tensors(std::move(of)), conversion(by), encrypted(is_encrypted) {
      file = tensorizer::tests::save_all(
          tensors, {.hashes = {!encrypted, true}, .key = encrypted ? test_key() : nullptr});
      for (size_t i = 0; i < tensors.size(); ++i) {
        expected.push_back(converts(i) ? converted(tensors[i].data, conversion) : tensors[i].data);
        memory.push_back(std::make_unique<DeviceMemory>(std::max<size_t>(1, expected[i].size())));
        memory.back()->fill(Bytes(memory.back()->size(), kFormer));
      }
    }

    bool converts(size_t i) const { return i % 3 != 2; }

    void run(const CudaCopyOptions& options, bool verify = false, const std::stop_token& stop = {},
             const io::SourceTraits& traits = {.concurrency = 4}) {
      CudaCopyEngine engine(options);
      ASSERT_EQ(engine.why_not_converted({}), "");
      staging = std::make_unique<DeviceMemory>(engine.staging_nbytes());
      staging->fill(Bytes(staging->size(), kFormer));
      engine.use_staging({staging->data(), staging->size(), nullptr});
      engine.order_after_caller();
      PlainSource source(file);
      source.settings = traits;
      const auto keys = encrypted ? std::make_shared<load::KeyRing>(test_key()) : nullptr;
      const auto opened = tensorizer::tests::open_all(source, keys.get());
      std::vector<load::LoadTarget> targets;
      for (uint32_t i = 0; i < memory.size(); ++i) {
        targets.push_back(
            {.entry = i, .destination = {memory[i]->data(), expected[i].size(), nullptr}});
        if (converts(i)) targets.back().conversion = conversion;
      }
      load::LoadSession(source, opened, std::move(targets),
                        {.verify = verify, .keys = keys.get(), .engine = &engine})
          .run(stop);
    }

    void expect_loaded() const {
      for (size_t i = 0; i < tensors.size(); ++i) {
        Bytes found = memory[i]->bytes();
        found.resize(expected[i].size());
        EXPECT_TRUE(same(found, expected[i])) << i;
      }
    }

    // Zeros, or what was there before anything arrived.
    static bool is_wiped(const DeviceMemory& memory) {
      return testing::only_holds(memory.bytes(), std::byte{0}, kFormer);
    }
    void expect_nothing_left() const {
      EXPECT_TRUE(is_wiped(*staging));
      for (size_t i = 0; i < memory.size(); ++i) EXPECT_TRUE(is_wiped(*memory[i])) << i;
    }

    std::vector<Tensor> tensors;
    load::Conversion conversion;
    bool encrypted;
    Bytes file;
    std::vector<Bytes> expected;
    std::vector<std::unique_ptr<DeviceMemory>> memory;
    std::unique_ptr<DeviceMemory> staging;
  };

  static std::vector<Tensor> some(uint64_t seed = 5) {
    return tensorizer::tests::make_tensors(
        {2 * kMib + 800'008, 1000, 72, 0, 300'000, 8, 2 * kMib, 16}, seed);
  }
  static constexpr load::Conversion kNarrower{kFloat32, kBfloat16}, kWider{kFloat16, kFloat64};
};

TEST_F(CudaConvert, EveryPairOfTypesGivesWhatTheHostGives) {
  for (uint32_t from = kFloat16; from <= kFloat64; ++from) {
    for (uint32_t to = kFloat16; to <= kFloat64; ++to) {
      if (from == to) continue;
      Load load(tensorizer::tests::make_tensors({400'000, 88}, from),
                {static_cast<ElementType>(from), static_cast<ElementType>(to)}, false);
      load.run(ring());
      load.expect_loaded();
    }
  }
}

TEST_F(CudaConvert, WhateverBringsTheBytes) {
  fake().set_delay(0, 500);
  for (const OpenOnDevice open : {OpenOnDevice::never, OpenOnDevice::always}) {
    for (const bool encrypted : {false, true}) {
      for (const bool verify : {false, true}) {
        for (const bool prompt : {false, true}) {
          Load load(some(), kNarrower, encrypted);
          load.run(ring(open), verify, {}, {.concurrency = 4, .prompt = prompt, .waits = !prompt});
          load.expect_loaded();
          if (encrypted) {
            EXPECT_TRUE(Load::is_wiped(*load.staging)) << "plaintext was left in staging memory";
          }
        }
      }
    }
  }
}

TEST_F(CudaConvert, MoreTensorsThanABufferHasRoomForShareSeveral) {
  for (const bool verify : {false, true}) {
    Load load(tensorizer::tests::make_tensors(std::vector<size_t>(5 * kMostConversions, 12), 3),
              kWider, false);
    const unsigned before = fake().calls("cuLaunchKernel");
    load.run(ring(), verify, {}, {.concurrency = 2, .prompt = true});
    load.expect_loaded();
    // Of the self-test, the first time; headers are pieces too.
    EXPECT_GE(fake().calls("cuLaunchKernel") - before, (verify ? 0U : 3U) + 10U);
  }
}

TEST_F(CudaConvert, UnitsOfFewPiecesShareABufferWhileItHasRoomForTheirConversions) {
  std::vector<size_t> sizes;
  for (size_t i = 0; i < 3 * kMostConversions; ++i) sizes.push_back(i % 64 == 0 ? 300'000 : 400);
  Load load(tensorizer::tests::make_tensors(sizes, 3), kWider, false);
  load.run(ring(), true, {}, {.concurrency = 2, .prompt = true});
  load.expect_loaded();
}

TEST_F(CudaConvert, StagingMemoryIsUsedAgainOnlyBehindItsConversion) {
  fake().set_delay(0, 3000);
  Load load(tensorizer::tests::make_tensors({12 * kMib}, 9), kNarrower, false);
  load.run(ring());
  load.expect_loaded();
}

TEST_F(CudaConvert, AForgedChunkLeavesNothingOnTheDevice) {
  for (const OpenOnDevice open : {OpenOnDevice::never, OpenOnDevice::always}) {
    for (const size_t from_end : {2000UL, 2 * kMib, 4 * kMib}) {
      Load load(some(), kWider, true);
      load.file[load.file.size() - from_end] ^= std::byte{1};
      const std::string what = testing::expect_error(Errc::crypto, [&] { load.run(ring(open)); });
      EXPECT_NE(what.find("tensor 't"), std::string::npos) << what;
      load.expect_nothing_left();
    }
  }
}

TEST_F(CudaConvert, ADriverThatRefusesInTheMiddleEndsTheLoadAndLeavesNothing) {
  // Each counted from the first call after the self-test.
  for (const char* call :
       {"cuLaunchKernel:2:1", "cuMemcpyBatchAsync:1:700", "cuMemcpyBatchAsync:2:700",
        "cuMemcpyBatchAsync:3:700", "cuMemsetD8Async:1:1", "cuEventRecord:3:1"}) {
    SCOPED_TRACE(call);
    Load load(some(), kNarrower, true);
    load.run(ring());
    load.expect_loaded();
    for (const auto& memory : load.memory) memory->fill(Bytes(memory->size(), kFormer));
    fake().reset();
    fake().fail(call);
    const std::string what = testing::expect_error(Errc::device, [&] { load.run(ring()); });
    EXPECT_NE(what.find("CUDA device 0"), std::string::npos) << what;
    load.expect_nothing_left();
    fake().reset();
    load.run(ring());
    load.expect_loaded();
  }
}

TEST_F(CudaConvert, AStopInTheMiddleLeavesNothing) {
  Load load(some(), kNarrower, true);
  load.run(ring());
  for (const unsigned copies : {1U, 4U, 9U}) {
    for (const auto& memory : load.memory) memory->fill(Bytes(memory->size(), kFormer));
    fake().reset();
    fake().set_delay(2000, 4000);
    std::stop_source stop;
    std::jthread asks([&](const std::stop_token& done) {
      while (fake().calls("cuEventRecord") < copies && !done.stop_requested())
        std::this_thread::sleep_for(std::chrono::microseconds(100));
      stop.request_stop();
    });
    try {
      load.run(ring(), false, stop.get_token());
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Errc::cancelled);
      load.expect_nothing_left();
    }
  }
}

TEST_F(CudaConvert, NothingConvertsWhereTheKernelsCannotBeHad) {
  fake().fail("cuModuleLoadData:1:222");
  {
    CudaCopyEngine engine(ring());
    EXPECT_NE(engine.why_not_converted({}).find("loading the kernels"), std::string::npos);
    testing::expect_error(Errc::device, [&] { engine.use_staging({nullptr, 0, nullptr}); });
    EXPECT_EQ(engine.staging().nbytes, 0U);
  }
  EXPECT_TRUE(release_pinned(0));
}

}  // namespace
}  // namespace tensorizer::device::cuda::tests
