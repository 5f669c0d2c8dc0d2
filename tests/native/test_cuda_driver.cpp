// Finding the driver: none, an old one, ones of every supported age. Each case runs in a process of
// its own, because a driver is chosen once.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include "device_harness.h"

namespace tensorizer::device::cuda::tests {
namespace {

class CudaDriver : public ::testing::Test {
 protected:
  void SetUp() override { GTEST_FLAG_SET(death_test_style, "threadsafe"); }

  // Ends the process: 0 if the driver at `library`, posing as `version`, moves bytes there and
  // back.
  [[noreturn]] static void use_driver(const char* library, const char* version) {
    ::setenv("FAKE_CUDA_VERSION", version, 1);
    ::setenv("FAKE_CUDA_LIBRARY", library, 1);
    set_driver_library(library);
    if (driver().version != std::atoi(version)) ::_exit(2);
    if ((driver().cuMemcpyBatchAsync != nullptr) != (driver().version >= 12080)) ::_exit(3);
    const Bytes source = random_bytes(150'000, 30);
    DeviceMemory memory(source.size());
    CudaCopyEngine engine(options());
    auto units = plan(memory.data(), source.size(), engine.buffer_nbytes(), 3000);
    for (Unit& unit : units) std::reverse(unit.pieces.begin(), unit.pieces.end());
    load(engine, source, units);
    ::_exit(memory.bytes() == source && save(engine, source.size(), units) == source ? 0 : 4);
  }

  // Ends the process: 0 if asking for the driver throws Error(device) with `text` in it.
  [[noreturn]] static void expect_no_driver(const std::string& library, const char* text) {
    set_driver_library(library);
    try {
      driver();
    } catch (const Error& error) {
      const bool says_so = std::string(error.what()).find(text) != std::string::npos;
      if (!says_so) std::fprintf(stderr, "%s\n", error.what());
      ::_exit(error.code() == Errc::device && says_so ? 0 : 2);
    }
    ::_exit(3);
  }
};

TEST_F(CudaDriver, WorksFromEveryReleaseSince113) {
  EXPECT_EXIT(use_driver(FAKE_CUDA_11_LIBRARY, "11030"), ::testing::ExitedWithCode(0), "");
  EXPECT_EXIT(use_driver(FAKE_CUDA_11_LIBRARY, "11080"), ::testing::ExitedWithCode(0), "");
  EXPECT_EXIT(use_driver(FAKE_CUDA_LIBRARY, "12000"), ::testing::ExitedWithCode(0), "");
  EXPECT_EXIT(use_driver(FAKE_CUDA_LIBRARY, "12080"), ::testing::ExitedWithCode(0), "");
  EXPECT_EXIT(use_driver(FAKE_CUDA_LIBRARY, "13000"), ::testing::ExitedWithCode(0), "");
}

TEST_F(CudaDriver, ThatIsMissingIsNamedInTheError) {
  EXPECT_EXIT(expect_no_driver("libno-such-driver.so.1", "libno-such-driver.so.1"),
              ::testing::ExitedWithCode(0), "");
}

TEST_F(CudaDriver, ThatIsTooOldIsNamedWithItsVersion) {
  ::setenv("FAKE_CUDA_VERSION", "11020", 1);
  EXPECT_EXIT(expect_no_driver(FAKE_CUDA_11_LIBRARY, "got version 11020"),
              ::testing::ExitedWithCode(0), "");
  ::unsetenv("FAKE_CUDA_VERSION");
}

TEST_F(CudaDriver, WithoutADeviceIsAnError) {
  ::setenv("FAKE_CUDA_DEVICES", "0", 1);
  EXPECT_EXIT(expect_no_driver(FAKE_CUDA_LIBRARY, "(100)"), ::testing::ExitedWithCode(0), "");
  ::unsetenv("FAKE_CUDA_DEVICES");
}

TEST_F(CudaDriver, LookingWhetherItIsThereLeavesForkedChildrenFreeToUseIt) {
  const auto look_and_fork = [] {
    set_driver_library(fake_library());
    if (!driver_is_present() || driver_is_in_use()) ::_exit(2);
    const pid_t child = ::fork();
    if (child == 0) ::_exit(driver().version > 0 ? 0 : 3);
    int status = -1;
    ::waitpid(child, &status, 0);
    ::_exit(status == 0 ? 0 : 4);
  };
  EXPECT_EXIT(look_and_fork(), ::testing::ExitedWithCode(0), "");
}

TEST_F(CudaDriver, CannotBeExchangedOnceItIsInUse) {
  const auto exchange = [] {
    set_driver_library(fake_library());
    driver();
    set_driver_library(fake_library());
    ::_exit(code_of([] { set_driver_library("libcuda.so.1"); }) == Errc::invalid_argument ? 0 : 2);
  };
  EXPECT_EXIT(exchange(), ::testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace tensorizer::device::cuda::tests
