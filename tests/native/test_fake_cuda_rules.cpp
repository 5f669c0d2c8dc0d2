// The fake driver does notice: each program below breaks one rule of CUDA and is ended for it.
// Without these, silence in the other tests would prove nothing.
#include <gtest/gtest.h>

#include <thread>

#include "device/cuda/copy_stream.h"
#include "device_harness.h"

namespace tensorizer::device::cuda::tests {
namespace {

#if !defined(TENSORIZER_TSAN)  // whose runtime ends a child that aborts with threads alive only
                               // after long waits

class FakeCudaRules : public ::testing::Test {
 protected:
  void SetUp() override { GTEST_FLAG_SET(death_test_style, "threadsafe"); }
};

// A program of a few driver calls, in the context of device 0, with one pinned page and one page of
// device memory.
struct Program {
  Program() {
    set_driver_library(fake_library());
    d = &driver();
    d->cuDevicePrimaryCtxRetain(&context, 0);
    d->cuCtxPushCurrent(context);
    d->cuStreamCreate(&stream, kStreamNonBlocking);
    d->cuStreamCreate(&other, kStreamNonBlocking);
    d->cuEventCreate(&event, kEventDisableTiming);
    void* address = nullptr;
    d->cuMemHostAlloc(&address, 4096, kHostAllocPortable);
    pinned = static_cast<std::byte*>(address);
    memory = fake().allocate(0, 4096);
    device = reinterpret_cast<DevicePointer>(memory);
    fake().set_delay(50'000, 50'000);
  }
  void upload(Stream on) { d->cuMemcpyHtoDAsync(device, pinned, 4096, on); }
  void download(Stream on) { d->cuMemcpyDtoHAsync(pinned, device, 4096, on); }

  const Driver* d = nullptr;
  Context context = nullptr;
  Stream stream = nullptr;
  Stream other = nullptr;
  Event event = nullptr;
  std::byte* pinned = nullptr;
  void* memory = nullptr;
  DevicePointer device = 0;
};

void expect_rule(void (*break_it)(Program&), const char* message) {
  EXPECT_DEATH(
      {
        Program program;
        break_it(program);
        std::this_thread::sleep_for(std::chrono::seconds(1));
      },
      message);
}

TEST_F(FakeCudaRules, ASlotStaysAsItIsUntilItsCopyHasRun) {
  expect_rule(
      [](Program& p) {
        p.upload(p.stream);
        p.pinned[17] ^= std::byte{1};
      },
      "a slot was changed before the copies from it had run");
}

TEST_F(FakeCudaRules, ASlotIsNotOverwrittenByAnotherStreamThatNothingOrders) {
  expect_rule(
      [](Program& p) {
        p.upload(p.stream);
        p.download(p.other);
      },
      "nothing orders them");
}

TEST_F(FakeCudaRules, ADestinationIsNotReadByAStreamThatDoesNotWait) {
  expect_rule(
      [](Program& p) {
        p.upload(p.stream);
        fake().compute(nullptr, 0, p.memory, 10, -1, 0);
      },
      "the same device memory");
}

TEST_F(FakeCudaRules, ADestinationIsNotWrittenBeforeTheCallersWork) {
  expect_rule(
      [](Program& p) {
        fake().compute(nullptr, 0, p.memory, 10, 1, 0);
        p.upload(p.stream);
      },
      "the same device memory");
}

TEST_F(FakeCudaRules, ADestinationIsNotFreedUnderACopy) {
  expect_rule(
      [](Program& p) {
        p.upload(p.stream);
        fake().free(p.memory, nullptr);
      },
      "device memory was freed under a copy");
}

TEST_F(FakeCudaRules, ADestinationIsNotReadByTheHostBeforeItWaited) {
  expect_rule(
      [](Program& p) {
        p.upload(p.stream);
        char byte = 0;
        fake().read(p.memory, &byte, 1);
      },
      "read before its copies had run");
}

TEST_F(FakeCudaRules, TheDefaultStreamIsTheCallers) {
  expect_rule([](Program& p) { p.upload(nullptr); }, "default stream");
}

TEST_F(FakeCudaRules, MemoryIsNotWipedUnderACopyOfAnotherStream) {
  expect_rule(
      [](Program& p) {
        p.upload(p.stream);
        p.d->cuMemsetD8Async(p.device, 0, 10, p.other);
      },
      "nothing orders them");
}

TEST_F(FakeCudaRules, OnlyAllocatedMemoryIsWiped) {
  expect_rule([](Program& p) { p.d->cuMemsetD8Async(p.device + 1, 0, 4096, p.stream); },
              "not allocated");
}

TEST_F(FakeCudaRules, StreamsDoNotSynchroniseWithTheDefaultStream) {
  expect_rule([](Program& p) { p.d->cuStreamCreate(&p.stream, 0); },
              "synchronises with the default");
}

TEST_F(FakeCudaRules, AsynchronousCopiesNeedPinnedMemory) {
  expect_rule(
      [](Program& p) {
        static char pageable[16];
        p.d->cuMemcpyHtoDAsync(p.device, pageable, sizeof pageable, p.stream);
      },
      "not pinned");
}

TEST_F(FakeCudaRules, CopiesStayWithinAllocatedDeviceMemory) {
  expect_rule([](Program& p) { p.d->cuMemcpyHtoDAsync(p.device + 1, p.pinned, 4096, p.stream); },
              "not allocated");
}

TEST_F(FakeCudaRules, PinnedMemoryIsNotFreedUnderACopy) {
  expect_rule(
      [](Program& p) {
        p.upload(p.stream);
        p.d->cuMemFreeHost(p.pinned);
      },
      "pinned memory was freed under a copy");
}

TEST_F(FakeCudaRules, AStreamIsNotDestroyedWhileItWorks) {
  expect_rule(
      [](Program& p) {
        p.upload(p.stream);
        p.d->cuStreamDestroy(p.stream);
      },
      "a stream was destroyed while it still had work");
}

TEST_F(FakeCudaRules, HandlesAreNotUsedAfterTheirEnd) {
  expect_rule(
      [](Program& p) {
        p.d->cuEventDestroy(p.event);
        p.d->cuEventRecord(p.event, p.stream);
      },
      "an event was used that does not exist any more");
}

TEST_F(FakeCudaRules, AContextIsPoppedByTheThreadThatPushedIt) {
  expect_rule([](Program& p) { std::thread([&] { p.d->cuCtxPushCurrent(p.context); }).join(); },
              "a thread ended with a context still pushed");
}

TEST_F(FakeCudaRules, TheHostDoesNotTouchDeviceMemory) {
  EXPECT_DEATH(
      {
        Program program;
        *static_cast<volatile char*>(program.memory) = 1;
      },
      "");
}

TEST_F(FakeCudaRules, EventsThatOrderTwoStreamsMakeTheSameAccessesRight) {
  const auto obey = [] {
    Program p;
    fake().set_delay(0, 100);
    p.upload(p.stream);
    p.d->cuEventRecord(p.event, p.stream);
    p.d->cuStreamWaitEvent(p.other, p.event, 0);
    p.download(p.other);
    p.d->cuStreamSynchronize(p.other);
    p.pinned[0] ^= std::byte{1};
    fake().free(p.memory, nullptr);
    ::_exit(0);
  };
  EXPECT_EXIT(obey(), ::testing::ExitedWithCode(0), "");
}

#endif

}  // namespace
}  // namespace tensorizer::device::cuda::tests
