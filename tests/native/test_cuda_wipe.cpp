// After a failed load of an encrypted file its destinations on the device hold zeros when the error
// is out: the whole path, file to fake device. Where nothing had arrived, nothing is written.
#include <gtest/gtest.h>

#include <chrono>

#include "fake_driver.h"
#include "session_harness.h"

namespace tensorizer::device::cuda::tests {
namespace {

using namespace std::chrono_literals;
using tensorizer::tests::Bytes;
using tensorizer::tests::PlainSource;
using tensorizer::tests::Tensor;
using tensorizer::tests::test_key;

constexpr size_t kChunk = 2 << 20;

class CudaWipe : public FakeDriverTest {
 protected:
  void SetUp() override {
    FakeDriverTest::SetUp();
    file_ = tensorizer::tests::save_all(tensors_, {.hashes = {false, true}, .key = test_key()});
  }

  // Device memory for each tensor, none of it zero.
  void allocate(void* stream = nullptr) {
    for (const Tensor& tensor : tensors_) {
      memory_.push_back(std::make_unique<DeviceMemory>(tensor.data.size(), 0, stream));
      memory_.back()->fill(Bytes(tensor.data.size(), kBefore));
    }
  }

  // The error of loading `file_`, one unit after another so that what was read before it arrived.
  Error error_of_load(unsigned char key = 7, void* stream = nullptr) {
    CudaCopyOptions options;
    options.caller_stream = reinterpret_cast<uintptr_t>(stream);
    options.pinned = {3, kChunk, 60'000ms};
    CudaCopyEngine engine(options);
    PlainSource source(file_);
    // A wrong key shows when a file is opened, unless another one was taken for that.
    load::KeyRing right(test_key()), keys(test_key(key));
    const auto opened = open_all(source, &right);
    std::vector<load::LoadTarget> targets;
    for (uint32_t i = 0; i < memory_.size(); ++i)
      targets.push_back(
          {.entry = i, .destination = {memory_[i]->data(), memory_[i]->size(), nullptr}});
    load::LoadSession session(source, opened, targets,
                              {.max_workers = 1, .keys = &keys, .engine = &engine});
    try {
      tensorizer::tests::run_load(session);
    } catch (const Error& error) {
      return error;
    }
    ADD_FAILURE() << "nothing was thrown";
    return Error(Errc::invalid_argument, "");
  }

  void damage_the_end() { file_[file_.size() - 100] ^= std::byte{1}; }
  unsigned copies() const {
    return fake().calls("cuMemcpyHtoDAsync") + fake().calls("cuMemcpyBatchAsync");
  }
  void expect_everywhere(std::byte value) const {
    for (const auto& memory : memory_) EXPECT_TRUE(memory->bytes() == Bytes(memory->size(), value));
  }

  static constexpr std::byte kBefore{0x5A};
  std::vector<Tensor> tensors_ =
      tensorizer::tests::make_tensors({3 * kChunk + 5, 1000, 2 * kChunk, 77, kChunk}, 21);
  Bytes file_;
  std::vector<std::unique_ptr<DeviceMemory>> memory_;
};

TEST_F(CudaWipe, WhatHadArrivedIsZeroWhenTheErrorIsOut) {
  fake().set_delay(0, 3000);
  allocate();
  damage_the_end();
  const Error error = error_of_load();
  EXPECT_EQ(error.code(), Errc::crypto);
  EXPECT_NE(std::string(error.what()).find("t4"), std::string::npos) << error.what();
  EXPECT_GE(copies(), 5U);
  expect_everywhere(std::byte{0});
}

TEST_F(CudaWipe, EveryDestinationIsWipedWhateverTheirNumber) {
  const std::vector<size_t> sizes(700, 40'000);
  tensors_ = tensorizer::tests::make_tensors(sizes, 5);
  file_ = tensorizer::tests::save_all(tensors_, {.hashes = {false, true}, .key = test_key()});
  allocate();
  damage_the_end();
  EXPECT_EQ(error_of_load().code(), Errc::crypto);
  EXPECT_GE(copies(), 5U);
  EXPECT_EQ(fake().calls("cuMemsetD8Async"), sizes.size());
  expect_everywhere(std::byte{0});
}

TEST_F(CudaWipe, AWrongKeyLetsNothingArriveSoNothingIsWritten) {
  allocate();
  EXPECT_EQ(error_of_load(8).code(), Errc::crypto);
  EXPECT_EQ(fake().calls("cuMemsetD8Async"), 0U);
  expect_everywhere(kBefore);
}

// The allocator may hand out memory that earlier work on the caller's stream still uses.
TEST_F(CudaWipe, MemoryThatTheCallersWorkStillUsesIsLeftAloneAndNotWaitedFor) {
  void* stream = fake().make_stream(0);
  allocate(stream);
  file_[file_.size() / 2] ^= std::byte{1};
  {
    const HeldStream held(stream);
    fake().compute(stream, 0, memory_[0]->data(), memory_[0]->size(), 9, 0);
    EXPECT_EQ(error_of_load(8, stream).code(), Errc::crypto);
    EXPECT_TRUE(held.still_held());
  }
  fake().wait(stream, 0);
  EXPECT_TRUE(memory_[0]->bytes() == Bytes(memory_[0]->size(), std::byte{9}));
  memory_.clear();
  fake().destroy_stream(stream);
}

TEST_F(CudaWipe, ADriverThatRefusesToWipeDoesNotHideTheError) {
  allocate();
  damage_the_end();
  fake().fail("cuMemsetD8Async:2:700");
  const Error error = error_of_load();
  EXPECT_EQ(error.code(), Errc::crypto) << error.what();
  EXPECT_EQ(fake().calls("cuMemsetD8Async"), 2U);
}

TEST_F(CudaWipe, ADeviceLostWhileItIsWipedDoesNotHideTheErrorNorHang) {
  allocate();
  damage_the_end();
  fake().fail("cuMemsetD8Async:1:719:sticky");
  EXPECT_EQ(error_of_load().code(), Errc::crypto);
  fake().reset();
  memory_.clear();
  EXPECT_TRUE(release_pinned(0));
  fake().forget_leaks();
}

TEST_F(CudaWipe, ADeviceLostDuringTheLoadIsTheErrorThatSurfaces) {
  allocate();
  fake().fail("execute:3:719");
  const Error error = error_of_load();
  EXPECT_EQ(error.code(), Errc::device);
  EXPECT_NE(std::string(error.what()).find("CUDA_ERROR_LAUNCH_FAILED"), std::string::npos)
      << error.what();
  fake().reset();
  memory_.clear();
  fake().forget_leaks();
}

TEST_F(CudaWipe, AfterACopyThatTheDriverRefusedWhatHadArrivedIsWiped) {
  allocate();
  fake().fail("cuMemcpyHtoDAsync:3:700");
  EXPECT_EQ(error_of_load().code(), Errc::device);
  EXPECT_GT(fake().calls("cuMemsetD8Async"), 0U);
  const auto [first, chunk] = std::pair(memory_[0]->bytes(), Bytes(kChunk, std::byte{0}));
  EXPECT_TRUE(std::equal(chunk.begin(), chunk.end(), first.begin()));
  for (const auto& memory : memory_) {  // and what had not begun to arrive is as it was
    EXPECT_TRUE(testing::only_holds(memory->bytes(), std::byte{0}, kBefore));
  }
}

TEST_F(CudaWipe, ALoadThatSucceedsIsNotWiped) {
  allocate();
  CudaCopyOptions options;
  options.pinned = {3, kChunk, 60'000ms};
  CudaCopyEngine engine(options);
  PlainSource source(file_);
  load::KeyRing keys(test_key());
  const auto opened = open_all(source, &keys);
  std::vector<load::LoadTarget> targets;
  for (uint32_t i = 0; i < memory_.size(); ++i)
    targets.push_back(
        {.entry = i, .destination = {memory_[i]->data(), memory_[i]->size(), nullptr}});
  load::LoadSession session(source, opened, targets, {.keys = &keys, .engine = &engine});
  tensorizer::tests::run_load(session);
  fake().wait(nullptr, 0);
  for (size_t i = 0; i < tensors_.size(); ++i)
    EXPECT_TRUE(memory_[i]->bytes() == tensors_[i].data) << i;
  EXPECT_EQ(fake().calls("cuMemsetD8Async"), 0U);
}

}  // namespace
}  // namespace tensorizer::device::cuda::tests
