// A temporary name belongs to the process that made it.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <filesystem>

#include "io/local/file_sink.h"

namespace tensorizer::io {
namespace {

// A file system without unnamed files.
class OldFileSystem final : public FileCalls {
 public:
  int open_unnamed(const std::string&, unsigned) override {
    errno = EOPNOTSUPP;
    return -1;
  }
};

TEST(FileSinkFork, AChildThatDropsTheSinkLeavesTheParentsTemporaryFile) {
  char pattern[] = "/tmp/file-sink-fork-XXXXXX";
  const std::filesystem::path folder = mkdtemp(pattern);
  OldFileSystem calls;
  const std::string target = folder / "f";
  auto sink = FileSink::replace(target, {.fsync = false, .calls = &calls});
  const std::vector<std::byte> bytes(100, std::byte{7});
  sink->write_at(0, ConstBuffer(bytes), {});
  const pid_t child = fork();
  if (child == 0) {
    sink.reset();
    _exit(0);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_EQ(status, 0);
  sink->publish(100, {});
  sink->finish({});
  EXPECT_EQ(std::filesystem::file_size(target), 100u);
  sink.reset();
  std::filesystem::remove(target);
  EXPECT_TRUE(std::filesystem::is_empty(folder));
  std::filesystem::remove(folder);
}

TEST(FileSinkFork, TheOwnerRemovesWhatItDidNotPublish) {
  char pattern[] = "/tmp/file-sink-fork-XXXXXX";
  const std::filesystem::path folder = mkdtemp(pattern);
  OldFileSystem calls;
  FileSink::replace(folder / "f", {.fsync = false, .calls = &calls}).reset();
  EXPECT_TRUE(std::filesystem::is_empty(folder));
  std::filesystem::remove(folder);
}

}  // namespace
}  // namespace tensorizer::io
