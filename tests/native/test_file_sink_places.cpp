// Names that no other file can take: what is written then, and what is left where it fails.
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <set>

#include "core/error.h"
#include "core/unique_fd.h"
#include "io/local/file_sink.h"
#include "io/local/file_system.h"

namespace tensorizer::io {
namespace {

class Refusing final : public FileCalls {
 public:
  int link(int fd, const std::string& path) override {
    errno = link_errno;
    return link_errno != 0 ? -1 : FileCalls::link(fd, path);
  }
  int rename(const std::string& from, const std::string& to) override {
    errno = rename_errno;
    return rename_errno != 0 ? -1 : FileCalls::rename(from, to);
  }
  int close(int fd) noexcept override {
    const int closed = FileCalls::close(fd);
    if (close_errno == 0) return closed;
    errno = close_errno;
    return -1;
  }
  int link_errno = 0, rename_errno = 0, close_errno = 0;
};

class FileSinkPlaces : public ::testing::Test {
 protected:
  FileSinkPlaces() {
    std::string pattern = "/tmp/file-sink-places-XXXXXX";
    folder_ = mkdtemp(pattern.data());
  }
  ~FileSinkPlaces() override { std::filesystem::remove_all(folder_); }

  std::string target() const { return folder_ / "f"; }
  void put(const std::string& text) const { std::ofstream(target()) << text; }
  std::string content() const {
    std::ifstream file(target(), std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  std::set<std::string> names() const {
    std::set<std::string> found;
    for (const auto& entry : std::filesystem::directory_iterator(folder_))
      found.insert(entry.path().filename());
    return found;
  }
  static void write(FileSink& sink, const std::string& text) {
    sink.reserve(text.size());
    sink.write_at(0, std::as_bytes(std::span(text)), {});
    sink.publish(text.size(), {});
  }

  std::filesystem::path folder_;
  Refusing calls_;
};

TEST_F(FileSinkPlaces, WhereACompleteFileGetsNoNameItsBytesGoIntoTheTarget) {
  const std::string text(3'000'000, 'n');
  for (const int problem : {EBUSY, ENOSYS, EOPNOTSUPP, EPERM, EXDEV}) {
    for (const bool links : {true, false}) {
      for (const bool is_there : {true, false}) {
        calls_.rename_errno = links ? problem : 0;
        calls_.link_errno = links ? 0 : problem;
        std::filesystem::remove(target());
        if (is_there) put(std::string(5'000'000, 'o'));
        const auto sink = FileSink::replace(target(), {.calls = &calls_});
        write(*sink, text);
        EXPECT_EQ(content(), text) << problem;
        const std::string more = text + "and more";
        sink->write_at(text.size(), std::as_bytes(std::span(more)).subspan(text.size()), {});
        sink->publish(more.size(), {});
        sink->finish({});
        EXPECT_EQ(content(), more) << problem;
        EXPECT_EQ(names(), std::set<std::string>{"f"}) << problem;
      }
    }
  }
}

TEST_F(FileSinkPlaces, ANameThatCannotBeGivenForAnotherReasonLeavesTheTargetAsItWas) {
  put("old");
  for (const int problem : {EIO, ENOSPC, EROFS}) {
    calls_.rename_errno = problem;
    const auto sink = FileSink::replace(target(), {.calls = &calls_});
    EXPECT_THROW(write(*sink, "new"), Error);
    sink->abandon();
    EXPECT_EQ(content(), "old");
    EXPECT_EQ(names(), std::set<std::string>{"f"});
  }
}

TEST_F(FileSinkPlaces, AFileThatIsWrittenInPlaceGoesAwayIfItIsNewAndNothingIsPublished) {
  for (const bool published : {true, false}) {
    for (const bool ends : {true, false}) {
      const auto sink = FileSink::in_place(target(), {.calls = &calls_});
      if (published) write(*sink, "new");
      if (ends) sink->finish({});
      sink->abandon();
      EXPECT_EQ(names().size(), published ? 1U : 0U);
      std::filesystem::remove(target());
    }
  }
  put("old");
  FileSink::in_place(target(), {})->abandon();
  EXPECT_EQ(content(), "old") << "nothing was written";
  const auto sink = FileSink::in_place(target(), {});
  sink->reserve(1);
  sink->abandon();
  EXPECT_EQ(names(), std::set<std::string>{"f"}) << "it was there before";
}

TEST_F(FileSinkPlaces, WhatTheMountSaysWhenItStoresIsAnErrorOfTheSave) {
  calls_.close_errno = EIO;
  const auto sink = FileSink::in_place(target(), {.calls = &calls_});
  write(*sink, "new");
  try {
    sink->finish({});
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.system_errno, EIO);
    EXPECT_NE(std::string(error.what()).find(target()), std::string::npos) << error.what();
  }
}

TEST_F(FileSinkPlaces, AFolderOfALocalDiskTakesNewFilesAndBytesInAnyOrder) {
  for (int i = 0; i < 2; ++i) {
    const FolderTraits traits = folder_traits(folder_);
    EXPECT_TRUE(traits.renames);
    EXPECT_TRUE(traits.any_order);
  }
  EXPECT_TRUE(names().empty());
  EXPECT_TRUE(folder_traits(folder_ / "missing").renames) << "opening says what is wrong";
  put("x");
  EXPECT_FALSE(is_mount_point(target()));
  EXPECT_FALSE(is_mount_point(folder_ / "missing"));
}

}  // namespace
}  // namespace tensorizer::io
