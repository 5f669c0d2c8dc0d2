// Room for a new file is reserved before anything is written, except in memory.
#include <fcntl.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>

#include "core/unique_fd.h"
#include "io/local/file_sink.h"
#include "io/local/file_system.h"

namespace tensorizer::io {
namespace {

class Counted final : public FileCalls {
 public:
  int reserve(int fd, bool keep_size, uint64_t offset, uint64_t nbytes) override {
    ++reservations;
    return FileCalls::reserve(fd, keep_size, offset, nbytes);
  }
  int reservations = 0;
};

void expect_reserved_unless_in_memory(std::string pattern) {
  const std::filesystem::path folder = mkdtemp(pattern.data());
  const UniqueFd on(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  Counted calls;
  const auto sink = FileSink::replace(folder / "f", {.fsync = false, .calls = &calls});
  sink->reserve(1 << 20);
  EXPECT_EQ(calls.reservations, is_in_memory(on.get()) ? 0 : 1) << pattern;
  const std::vector<std::byte> bytes(1 << 20, std::byte{7});
  sink->write_at(0, ConstBuffer(bytes), {});
  sink->publish(bytes.size(), {});
  sink->finish({});
  EXPECT_EQ(std::filesystem::file_size(folder / "f"), bytes.size());
  std::filesystem::remove_all(folder);
}

TEST(FileSinkRoom, IsReservedWhereThatIsNotThePagesThemselves) {
  expect_reserved_unless_in_memory("/tmp/file-sink-room-XXXXXX");
  if (std::filesystem::is_directory("/dev/shm"))
    expect_reserved_unless_in_memory("/dev/shm/file-sink-room-XXXXXX");
}

}  // namespace
}  // namespace tensorizer::io
