// The cache of remote objects over a network in memory: what is fetched, what is kept, and what is
// believed of it later.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <random>
#include <thread>

#include "core/error.h"
#include "io/byte_ranges.h"
#include "io/cache/cache_disk.h"
#include "io/cache/cache_source.h"
#include "io/local/file_calls.h"

namespace tensorizer::io {
namespace {

constexpr uint64_t kB = kCacheBlockNbytes;

std::vector<std::byte> random_object(uint64_t nbytes) {
  std::mt19937_64 random(nbytes);
  std::vector<std::byte> bytes(nbytes);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

// An object of the network that counts what is asked of it.
class Network final : public RangeSource {
 public:
  Network(std::vector<std::byte> bytes, SourceTraits traits)
      : bytes_(std::move(bytes)), traits_(traits) {}
  const std::string& name() const noexcept override { return name_; }
  std::optional<uint64_t> size() const override { return bytes_.size(); }
  SourceTraits traits() const override { return traits_; }
  using RangeSource::read_at;
  void read_at(uint64_t offset, std::span<const Slice> slices, const std::stop_token&) override {
    const uint64_t begin = offset;
    std::this_thread::sleep_for(delay);
    for (const Slice& slice : slices) {
      std::copy_n(bytes_.begin() + static_cast<ptrdiff_t>(offset), slice.size(), slice.begin());
      offset += slice.size();
    }
    MutexLock lock(mutex_);
    ++reads;
    nbytes += offset - begin;
    if (seen_.first_missing(begin, offset) != begin) ++repeated;
    seen_.add(begin, offset);
    if (traits_.sequential && begin < last_) went_back = true;
    last_ = offset;
  }
  uint64_t bytes_read() const noexcept override { return nbytes; }

  std::chrono::milliseconds delay{0};
  std::atomic<uint64_t> reads{0}, nbytes{0}, repeated{0};
  bool went_back = false;

 private:
  const std::vector<std::byte> bytes_;
  const SourceTraits traits_;
  const std::string name_ = "object";
  Mutex mutex_;
  ByteRanges seen_ GUARDED_BY(mutex_);
  uint64_t last_ GUARDED_BY(mutex_) = 0;
};

class CacheSourceTest : public testing::Test {
 protected:
  CacheSourceTest() {
    char name[] = "/tmp/tzr-cache-XXXXXX";
    root = mkdtemp(name);
    folder = CacheFolder::open(root, true);
  }
  ~CacheSourceTest() override { std::filesystem::remove_all(root); }

  std::shared_ptr<Network> network(bool sequential = false) {
    return std::make_shared<Network>(object,
                                     SourceTraits{.concurrency = 8, .sequential = sequential});
  }
  std::shared_ptr<CacheSource> open(std::shared_ptr<RangeSource> from, CacheLimits limits = {},
                                    char location = '1') {
    return CacheSource::open(
        folder, {std::string(32, location), std::string(32, '2'), object.size(), "{}", limits},
        std::move(from), "object");
  }
  void expect_right(CacheSource& source, uint64_t offset, uint64_t nbytes) {
    std::vector<std::byte> found(nbytes);
    const Slice parts[] = {Slice(found).first(nbytes / 3), Slice(found).subspan(nbytes / 3)};
    source.read_at(offset, parts, {});
    EXPECT_TRUE(
        std::equal(found.begin(), found.end(), object.begin() + static_cast<ptrdiff_t>(offset)));
  }
  // Until all that was read is stored: a thread of the process writes it.
  static bool written() { return CacheDisk::instance().finish(std::chrono::minutes(1), {}); }
  std::string path(const char* file) const {
    return folder->path_of({std::string(32, '1'), std::string(32, '2')}) + "/" + file;
  }
  void overwrite(const char* file, off_t offset, const std::string& bytes) {
    const UniqueFd fd(::open(path(file).c_str(), O_WRONLY));
    ASSERT_EQ(pwrite(fd.get(), bytes.data(), bytes.size(), offset),
              static_cast<ssize_t>(bytes.size()));
  }

  std::string root;
  std::shared_ptr<CacheFolder> folder;
  std::vector<std::byte> object = random_object(10 * kB + 1234);
};

TEST_F(CacheSourceTest, WhatWasReadOnceIsNotFetchedAgainTheShortLastBlockIncluded) {
  const auto first = network();
  {
    const auto source = open(first);
    expect_right(*source, 100, object.size() - 200);
    EXPECT_TRUE(written());
    EXPECT_EQ(source->present_nbytes(), object.size());
    EXPECT_FALSE(source->was_complete());
  }
  EXPECT_EQ(first->nbytes, object.size());
  EXPECT_EQ(first->reads, 1U);
  const auto second = network();
  const auto source = open(second);
  EXPECT_TRUE(source->was_complete());
  expect_right(*source, 0, object.size());
  EXPECT_EQ(second->reads, 0U);
  EXPECT_EQ(source->cached_nbytes_read(), object.size());
}

TEST_F(CacheSourceTest, APartIsRoundedOutToBlocksAndTheRestComesLaterWithoutIt) {
  const auto from = network();
  const auto source = open(from);
  expect_right(*source, 3 * kB + 10, 20);
  EXPECT_EQ(from->nbytes, kB);
  EXPECT_TRUE(written());
  struct stat found{};
  ASSERT_EQ(stat(path("data").c_str(), &found), 0);
  EXPECT_LE(static_cast<uint64_t>(found.st_blocks) * 512, kB + 65536);
  expect_right(*source, 0, object.size());
  EXPECT_EQ(from->nbytes, object.size());
  EXPECT_EQ(from->repeated, 0U);
}

TEST_F(CacheSourceTest, ReadersAtTheSameTimeFetchEachByteOnce) {
  const auto from = network(), other = network();
  from->delay = other->delay = std::chrono::milliseconds(2);
  const auto one = open(from), two = open(other);  // as if of two processes
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < 8; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937_64 random(t);
      for (int i = 0; i < 40; ++i) {
        const uint64_t offset = random() % object.size();
        expect_right(t % 2 == 0 ? *one : *two, offset, random() % (object.size() - offset));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  expect_right(*one, 0, object.size());
  EXPECT_EQ(from->repeated + other->repeated, 0U);
  EXPECT_EQ(from->nbytes + other->nbytes, object.size());
}

TEST_F(CacheSourceTest, OnePassIsKeptWithoutGoingBack) {
  const auto from = network(true);
  const auto source = open(from);
  std::mt19937_64 random(5);
  for (uint64_t at = 0; at < object.size() - 7;) {
    const uint64_t step = std::min(1 + random() % (3 * kB), object.size() - 7 - at);
    expect_right(*source, at, step);
    at += step;
  }
  EXPECT_FALSE(from->went_back);
  EXPECT_TRUE(written());
  EXPECT_EQ(source->present_nbytes(), object.size());
  const auto again = network(true);
  const auto second = open(again);
  EXPECT_FALSE(second->traits().sequential);
  expect_right(*second, 0, object.size());
  EXPECT_EQ(again->reads, 0U);
}

TEST_F(CacheSourceTest, BitsOfAnEarlierBootCountOnlyWhereTheyAreDurable) {
  open(network())->fill({});
  overwrite("map", 24, "another boot of this machine");
  {
    const auto from = network();
    const auto source = open(from);
    EXPECT_TRUE(source->was_complete()) << "filling ends with durable blocks";
  }
  overwrite("map", 24, "another boot of this machine");
  overwrite("map", 64 + 2, std::string(2, '\0'));  // durable
  const auto from = network();
  const auto source = open(from);
  EXPECT_EQ(source->present_nbytes(), 0U);
  expect_right(*source, 0, object.size());
  EXPECT_EQ(from->nbytes, object.size());
}

TEST_F(CacheSourceTest, DamagedFilesAreAMissAndGo) {
  const std::function<void()> damages[] = {
      [&] { std::filesystem::resize_file(path("map"), 40); },
      [&] { std::filesystem::resize_file(path("data"), 40); },
      [&] { overwrite("map", 0, "TZRCMAP2"); },
      [&] { std::filesystem::remove(path("map")); },
      [&] { std::filesystem::remove(path("data")); },
  };
  for (const auto& damage : damages) {
    open(network())->fill({});
    damage();
    const auto from = network();
    const auto source = open(from);
    ASSERT_TRUE(source);
    expect_right(*source, 0, object.size());
    EXPECT_EQ(from->nbytes, object.size());
  }
}

TEST_F(CacheSourceTest, DataThatIsCutWhileItIsOpenIsAMissAndGoes) {
  const auto from = network();
  const auto source = open(from);
  source->fill({});
  std::filesystem::resize_file(path("data"), 5 * kB);
  expect_right(*source, 0, object.size());
  EXPECT_FALSE(std::filesystem::exists(path("data")));
}

TEST_F(CacheSourceTest, NothingThatIsOpenIsRemovedForRoom) {
  const CacheLimits limits{object.size() * 3 / 2, 0};
  auto first = open(network(), limits, '1');
  first->fill({});
  EXPECT_EQ(open(network(), limits, '3'), nullptr);
  first->close();
  const auto second = open(network(), limits, '3');
  ASSERT_TRUE(second);
  EXPECT_FALSE(std::filesystem::exists(path("data")));
  second->fill({});
  EXPECT_EQ(open(network(), {object.size() - 1, 0}, '4'), nullptr);
}

// A disk that takes everything, and says at the sync that it could not keep it.
class BadDisk final : public FileCalls {
 public:
  int sync_data(int) override {
    errno = EIO;
    return -1;
  }
};

TEST_F(CacheSourceTest, AnEntryThatCannotBeSyncedGoesAndIsNoted) {
  static BadDisk disk;  // the thread that syncs may be the last one to use it
  CacheDisk::instance().take_troubles();
  const CacheKey key{std::string(32, '1'), std::string(32, '2'), object.size(), "{}", {}};
  ASSERT_TRUE(folder->make_entry(key.location, key.version, key.nbytes, key.about));
  const std::string where = folder->path_of({key.location, key.version});
  const auto entry = CacheEntry::open(
      UniqueFd(::open(where.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)), key.nbytes, disk);
  ASSERT_TRUE(entry);
  const auto other = folder->open_entry(key.location, key.version, key.nbytes);
  const auto filling = std::make_shared<CacheFilling>(folder, entry, key);
  const Slice all(object);
  filling->add({0, entry->blocks()}, std::span(&all, 1), {}, true, {});
  ASSERT_TRUE(filling->finish({}));
  EXPECT_TRUE(other->is_complete());
  filling->rest();
  const auto until = std::chrono::steady_clock::now() + std::chrono::minutes(1);
  std::vector<CacheDisk::Trouble> troubles;
  while (troubles.empty() && std::chrono::steady_clock::now() < until) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    troubles = CacheDisk::instance().take_troubles();
  }
  ASSERT_EQ(troubles.size(), 1U);
  EXPECT_EQ(troubles[0], (CacheDisk::Trouble{root, "cannot sync: Input/output error"}));
  while (std::filesystem::exists(where) && std::chrono::steady_clock::now() < until)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  EXPECT_FALSE(std::filesystem::exists(where));
  EXPECT_EQ(other->present_nbytes(), 0U) << "others that have it open fetch its blocks again";
}

TEST_F(CacheSourceTest, OpenEntriesTogetherStayWithinTheLimit) {
  std::vector<std::shared_ptr<CacheSource>> sources;
  const CacheLimits limits{.max_nbytes = 2 * object.size() + 4 * kB};
  for (const char location : {'1', '3', '4', '5'}) {
    sources.push_back(open(network(), limits, location));
    ASSERT_TRUE(sources.back()) << "nothing is stored yet";
  }
  uint64_t stored = 0;
  for (const auto& source : sources) {
    expect_right(*source, 0, object.size());
    ASSERT_TRUE(written());
    stored += source->present_nbytes();
  }
  EXPECT_EQ(stored, 2 * object.size());
}

TEST_F(CacheSourceTest, WhatFailsACheckGoesAlsoWhereItCameOverTheNetwork) {
  {
    const auto source = open(network());
    EXPECT_FALSE(source->drop_copy());
    expect_right(*source, 0, object.size());
    ASSERT_TRUE(written());
    EXPECT_FALSE(source->drop_copy()) << "to read it again would read the network again";
    EXPECT_FALSE(std::filesystem::exists(path("data")));
  }
  expect_right(*open(network()), 0, object.size());
  ASSERT_TRUE(written());
  const auto source = open(network());
  expect_right(*source, 0, object.size());
  EXPECT_TRUE(source->drop_copy());
  EXPECT_FALSE(std::filesystem::exists(path("data")));
}

TEST_F(CacheSourceTest, OfflineOnlyWhatIsThereIsRead) {
  EXPECT_EQ(open(nullptr), nullptr);
  expect_right(*open(network()), 3 * kB, kB);
  EXPECT_TRUE(written());
  const auto source = open(nullptr);
  expect_right(*source, 3 * kB + 5, 100);
  std::byte one[1];
  EXPECT_THROW(source->read_at(0, Slice(one), {}), Error);
}

#if !defined(TENSORIZER_TSAN)  // which does not support threads in a child of a threaded process
TEST_F(CacheSourceTest, AForkedChildGoesOnWithLocksOfItsOwn) {
  const auto from = network();
  const auto source = open(from);
  expect_right(*source, 0, kB);
  const pid_t child = fork();
  if (child == 0) {
    std::vector<std::byte> found(object.size());
    source->read_at(0, Slice(found), {});
    source->close();
    _exit(found == object && written() ? 0 : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(source->present_nbytes(), object.size());
  EXPECT_FALSE(folder->remove(std::string(32, '1'), std::string(32, '2'), false)) << "still in use";
}
#endif

TEST_F(CacheSourceTest, FoldersThatOthersCanWriteToAreRefused) {
  open(network())->fill({});
  const std::string user = root + "/tensorizer-1/" + std::to_string(geteuid());
  chmod((user + "/" + std::string(32, '1')).c_str(), 0777);
  EXPECT_THROW(open(network()), Error);
  chmod(user.c_str(), 0770);
  EXPECT_THROW(CacheFolder::open(root, true), Error);
}

}  // namespace
}  // namespace tensorizer::io
