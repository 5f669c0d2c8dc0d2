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

constexpr uint64_t kUnit = uint64_t{256} << 10;

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
  void read_at(uint64_t offset, std::span<const Buffer> buffers, const std::stop_token&) override {
    const uint64_t begin = offset;
    std::this_thread::sleep_for(delay);
    for (const Buffer& buffer : buffers) {
      std::copy_n(bytes_.begin() + static_cast<ptrdiff_t>(offset), buffer.size(), buffer.begin());
      offset += buffer.size();
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
    const Buffer parts[] = {Buffer(found).first(nbytes / 3), Buffer(found).subspan(nbytes / 3)};
    source.read_at(offset, parts, {});
    EXPECT_TRUE(
        std::equal(found.begin(), found.end(), object.begin() + static_cast<ptrdiff_t>(offset)));
  }
  // Until all that was read is stored: a thread of the process writes it.
  static bool written() { return CacheDisk::instance().finish(std::chrono::minutes(1), {}); }
  std::string path(const char* file) const {
    return folder->path_of({std::string(32, '1'), std::string(32, '2')}) + "/" + file;
  }

  std::string root;
  std::shared_ptr<CacheFolder> folder;
  std::vector<std::byte> object = random_object(10 * kUnit + 51234);
};

TEST_F(CacheSourceTest, ALoadOfTheWholeObjectMakesACopyThatTheNextOneReads) {
  const auto first = network();
  {
    const auto source = open(first);
    source->begin_load(object.size(), {});
    expect_right(*source, 100, kUnit - 100);
    expect_right(*source, kUnit, object.size() - kUnit - 7);  // what is left comes at the end
    source->release();
    EXPECT_TRUE(written());
    EXPECT_FALSE(source->was_complete());
    EXPECT_EQ(source->trouble(), "");
  }
  EXPECT_EQ(first->nbytes, object.size());
  const auto second = network();
  const auto source = open(second);
  EXPECT_TRUE(source->was_complete());
  expect_right(*source, 0, object.size());
  EXPECT_EQ(second->reads, 0U);
  EXPECT_EQ(source->cached_nbytes_read(), object.size());
}

TEST_F(CacheSourceTest, ALoadOfPartsMakesNone) {
  const auto from = network();
  const auto source = open(from);
  source->begin_load(kUnit, {});
  expect_right(*source, kUnit + 10, 20);
  EXPECT_EQ(from->nbytes, 20U);
  source->release();
  EXPECT_TRUE(written());
  EXPECT_FALSE(std::filesystem::exists(path("about.json")));
}

TEST_F(CacheSourceTest, ALoadThatReadsLessThanItSaidLeavesNothing) {
  const auto from = network();
  {
    const auto source = open(from);
    source->begin_load(object.size(), {});
    EXPECT_TRUE(std::filesystem::exists(path("about.json")));
    expect_right(*source, kUnit, kUnit);
    source->release();
    EXPECT_EQ(source->trouble(), "only a part of it was read");
  }
  EXPECT_TRUE(written());
  EXPECT_FALSE(std::filesystem::exists(path("about.json")));
  EXPECT_EQ(from->nbytes, kUnit);
}

TEST_F(CacheSourceTest, LoadsAtTheSameTimeFetchTheObjectOnce) {
  const auto from = network(), other = network();
  from->delay = other->delay = std::chrono::milliseconds(20);
  const auto one = open(from), two = open(other);  // as if of two processes
  std::vector<std::thread> threads;
  for (const auto& source : {one, two}) {
    threads.emplace_back([this, source] {
      source->begin_load(object.size(), {});
      for (uint64_t at = 0; at < object.size(); at += kUnit)
        expect_right(*source, at, std::min(kUnit, object.size() - at));
      source->release();
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(from->repeated + other->repeated, 0U);
  EXPECT_EQ(from->nbytes + other->nbytes, object.size());
  EXPECT_EQ(one->cached_nbytes_read() + two->cached_nbytes_read(), object.size());
}

TEST_F(CacheSourceTest, AStopEndsTheWaitForAnotherLoad) {
  const auto one = open(network()), two = open(network());
  one->begin_load(object.size(), {});
  std::stop_source stop;
  stop.request_stop();
  EXPECT_THROW(two->begin_load(object.size(), stop.get_token()), Error);
}

TEST_F(CacheSourceTest, OnePassIsKeptWithoutGoingBackWithWhatItSkips) {
  const auto from = network(true);
  const auto source = open(from);
  source->begin_load(object.size(), {});
  std::mt19937_64 random(5);
  for (uint64_t at = 0; at < object.size() - 7;) {
    const uint64_t step = std::min(1 + random() % (3 * kUnit), object.size() - 7 - at);
    const uint64_t skip = step > 100 ? 50 : 0;
    expect_right(*source, at + skip, step - skip);
    at += step;
  }
  source->release();
  EXPECT_FALSE(from->went_back);
  EXPECT_TRUE(written());
  const auto again = network(true);
  const auto second = open(again);
  EXPECT_TRUE(second->was_complete());
  EXPECT_FALSE(second->traits().sequential);
  expect_right(*second, 0, object.size());
  EXPECT_EQ(again->reads, 0U);
}

TEST_F(CacheSourceTest, DamagedFilesAreAMissAndGo) {
  const std::function<void()> damages[] = {
      [&] { std::filesystem::resize_file(path("data"), 40); },
      [&] { std::filesystem::remove(path("lock")); },
      [&] { std::filesystem::remove(path("data")); },
      [&] { std::filesystem::permissions(path("data"), std::filesystem::perms::all); },
  };
  for (const auto& damage : damages) {
    open(network())->fill({});
    damage();
    const auto from = network();
    const auto source = open(from);
    ASSERT_TRUE(source);
    EXPECT_FALSE(source->was_complete());
    expect_right(*source, 0, object.size());
    EXPECT_EQ(from->nbytes, object.size());
  }
}

TEST_F(CacheSourceTest, DataThatIsCutWhileItIsOpenIsAMissAndGoes) {
  open(network())->fill({});
  const auto from = network();
  const auto source = open(from);
  std::filesystem::resize_file(path("data"), kUnit);
  expect_right(*source, 0, object.size());
  EXPECT_EQ(from->nbytes, object.size());
  EXPECT_FALSE(std::filesystem::exists(path("data")));
}

TEST_F(CacheSourceTest, NothingThatIsOpenIsRemovedForRoom) {
  const CacheLimits limits{object.size() * 3 / 2, 0};
  open(network(), limits, '1')->fill({});
  auto first = open(network(), limits, '1');
  EXPECT_THROW(open(network(), limits, '3')->fill({}), Error);
  first->close();
  open(network(), limits, '3')->fill({});
  EXPECT_FALSE(std::filesystem::exists(path("data")));
  EXPECT_THROW(open(network(), {object.size() - 1, 0}, '4')->fill({}), Error);
}

// A disk that takes everything, and says at the sync that it could not keep it.
class BadDisk final : public FileCalls {
 public:
  int sync(int) override {
    errno = EIO;
    return -1;
  }
  int sync_data(int) override { return sync(0); }
};

TEST_F(CacheSourceTest, ACopyThatCannotBeSyncedGoesAndIsNoted) {
  static BadDisk disk;
  CacheDisk::instance().take_troubles();
  const CacheKey key{std::string(32, '1'), std::string(32, '2'), object.size(), "{}", {}};
  const auto entry = folder->make_entry(key.location, key.version, key.nbytes, key.about);
  ASSERT_TRUE(entry && entry->begin_copy());
  const auto copy = std::make_shared<CacheCopy>(folder, entry, key, disk);
  const Buffer all(object);
  copy->add(0, std::span(&all, 1), true, {});
  copy->end();
  ASSERT_TRUE(copy->finish({}));
  ASSERT_TRUE(written()) << "the entry is removed a moment after the copy was given up";
  EXPECT_FALSE(copy->is_published());
  const auto troubles = CacheDisk::instance().take_troubles();
  ASSERT_EQ(troubles.size(), 1U);
  EXPECT_EQ(troubles[0].first, root);
  EXPECT_NE(troubles[0].second.find("Input/output error"), std::string::npos);
  EXPECT_FALSE(std::filesystem::exists(path("about.json")));
}

TEST_F(CacheSourceTest, WhatFailsACheckGoesAlsoWhereItCameOverTheNetwork) {
  {
    const auto source = open(network());
    EXPECT_FALSE(source->drop_copy());
    source->begin_load(object.size(), {});
    expect_right(*source, 0, object.size());
    ASSERT_TRUE(written());
    EXPECT_TRUE(std::filesystem::exists(path("data")));
    EXPECT_FALSE(source->drop_copy()) << "to read it again would read the network again";
    EXPECT_FALSE(std::filesystem::exists(path("data")));
  }
  open(network())->fill({});
  const auto source = open(network());
  expect_right(*source, 0, object.size());
  EXPECT_TRUE(source->drop_copy());
  EXPECT_FALSE(std::filesystem::exists(path("data")));
}

TEST_F(CacheSourceTest, OfflineOnlyACopyIsRead) {
  EXPECT_EQ(open(nullptr), nullptr);
  open(network())->fill({});
  const auto source = open(nullptr);
  expect_right(*source, 5, 100);
  std::filesystem::resize_file(path("data"), 0);
  std::byte one[1];
  EXPECT_THROW(source->read_at(0, Buffer(one), {}), Error);
}

#if !defined(TENSORIZER_TSAN)  // which does not support threads in a child of a threaded process
TEST_F(CacheSourceTest, AForkedChildReadsAndLeavesTheCopyToItsParent) {
  const auto source = open(network());
  source->begin_load(object.size(), {});
  expect_right(*source, 0, kUnit);
  const pid_t child = fork();
  if (child == 0) {
    std::vector<std::byte> found(object.size());
    source->read_at(0, Buffer(found), {});
    source->close();
    _exit(found == object ? 0 : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  EXPECT_FALSE(folder->remove(std::string(32, '1'), std::string(32, '2'), false)) << "still in use";
  expect_right(*source, kUnit, object.size() - kUnit);
  EXPECT_TRUE(written());
  EXPECT_TRUE(std::filesystem::exists(path("data")));
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
