// What is believed of a cache entry when the machine stops while it is filled.
#include <fcntl.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <numeric>

#include "io/cache/cache_entry.h"
#include "power_cut.h"

namespace tensorizer::io {
namespace {

using tests::PowerCut;
using Kind = PowerCut::Step::Kind;
constexpr uint64_t kB = kCacheBlockNbytes;

// Notes, besides, what `map` says when each step begins.
class WatchedDisk final : public FileCalls {
 public:
  PowerCut cut;
  std::string map;
  std::vector<std::string> maps;

  ssize_t write(int fd, const iovec* vectors, int count, uint64_t offset) override {
    look();
    return cut.write(fd, vectors, count, offset);
  }
  int sync_data(int fd) override {
    look();
    return cut.sync_data(fd);
  }
  void push(int, uint64_t, uint64_t) noexcept override {}
  void look() {
    std::ifstream file(map, std::ios::binary);
    maps.resize(cut.steps.size());
    maps.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }
};

class CachePowerCutTest : public testing::TestWithParam<unsigned> {
 protected:
  CachePowerCutTest() {
    std::string name = (std::filesystem::temp_directory_path() / "tzr-cache-XXXXXX").string();
    root = mkdtemp(name.data());
    const UniqueFd folder = open_root();
    CacheEntry::create_files(folder.get(), object.size(), "{}");
    for (std::byte& byte : object)
      byte = static_cast<std::byte>(random() | 1);  // never what a hole has
    disk.map = root + "/map";
    const UniqueFd data(::open((root + "/data").c_str(), O_RDONLY | O_CLOEXEC));
    struct stat found{};
    fstat(data.get(), &found);
    disk.cut.steps.push_back({.kind = Kind::create, .file = found.st_ino, .name = "data"});
    disk.cut.steps.push_back({Kind::truncate, found.st_ino, object.size()});
    disk.cut.steps.push_back({Kind::sync, found.st_ino});
    disk.cut.steps.push_back({Kind::sync_folder});
  }
  ~CachePowerCutTest() override { std::filesystem::remove_all(root); }

  UniqueFd open_root() const {
    return UniqueFd(::open(root.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  }
  ConstSlice bytes_of(BlockRun run) const {
    const uint64_t end = std::min<uint64_t>(run.end * kB, object.size());
    return ConstSlice(object).subspan(run.begin * kB, end - run.begin * kB);
  }
  size_t wrong_blocks(const PowerCut::Content& content, const std::string& map) const {
    size_t wrong = 0;
    const size_t bits = (map.size() - kCacheHeadNbytes) / 2;
    for (uint64_t block = 0; block < CacheEntry::blocks_of(object.size()); ++block) {
      const bool durable = ((map[kCacheHeadNbytes + bits + block / 8] >> (block % 8)) & 1) != 0;
      const ConstSlice wanted = bytes_of({block, block + 1});
      const bool right = content.size() == object.size() &&
                         std::equal(wanted.begin(), wanted.end(),
                                    content.begin() + static_cast<ptrdiff_t>(block * kB));
      if (durable && !right) ++wrong;
    }
    return wrong;
  }

  std::mt19937 random{GetParam()};
  std::string root;
  std::vector<std::byte> object = std::vector<std::byte>(5 * kB + 777);
  WatchedDisk disk;
};

TEST_P(CachePowerCutTest, ADurableBitCoversBytesThatAreOnTheDiskWheneverThePowerGoes) {
  const auto entry = CacheEntry::open(open_root(), object.size(), disk);
  ASSERT_TRUE(entry);
  std::vector<uint64_t> order(CacheEntry::blocks_of(object.size()));
  std::iota(order.begin(), order.end(), uint64_t{0});
  std::ranges::shuffle(order, random);
  for (const uint64_t block : order) {
    uint64_t end = 0;
    ASSERT_EQ(entry->write({block, block + 1}, bytes_of({block, block + 1}), end), 0);
    ASSERT_EQ(end, block + 1);
    if (random() % 3 == 0) {
      ASSERT_EQ(entry->make_durable(), 0);
    }
  }
  ASSERT_EQ(entry->make_durable(), 0);
  disk.look();
  ASSERT_EQ(disk.maps.size(), disk.cut.steps.size() + 1);
  ASSERT_GE(disk.cut.count(Kind::sync), 2U);
  for (size_t done = 4; done < disk.maps.size(); ++done) {
    for (int tries = 0; tries < 2; ++tries) {
      const auto content = disk.cut.after(done, "data", false, random);
      ASSERT_TRUE(content);
      ASSERT_EQ(wrong_blocks(*content, disk.maps[done]), 0U) << "after step " << done;
    }
  }
  const size_t durable = wrong_blocks(PowerCut::Content(object.size()), disk.maps.back());
  EXPECT_EQ(durable, order.size()) << "in the end all of them are durable";
}

TEST_P(CachePowerCutTest, AfterASyncThatFailsNothingIsDurableAndNothingElseIsPresent) {
  const auto entry = CacheEntry::open(open_root(), object.size(), disk);
  uint64_t end = 0;
  ASSERT_EQ(entry->write({0, 3}, bytes_of({0, 3}), end), 0);
  disk.cut.fail_at = static_cast<int>(disk.cut.steps.size());
  EXPECT_EQ(entry->make_durable(), EIO);
  EXPECT_EQ(entry->present_nbytes(), 0U) << "what may be dropped is not believed";
  EXPECT_EQ(entry->write({3, 5}, bytes_of({3, 5}), end), EIO);
  EXPECT_EQ(end, 3U) << "no bit without its bytes";
  disk.look();
  EXPECT_EQ(wrong_blocks(PowerCut::Content(object.size()), disk.maps.back()), 0U);
}

INSTANTIATE_TEST_SUITE_P(Seeds, CachePowerCutTest, testing::Range(0U, 4U));

}  // namespace
}  // namespace tensorizer::io
