// Reads past the page cache, and through it of files that are not cached: whatever the offsets,
// lengths and addresses are, the bytes of the file and no others.
#include "io/local/direct_file.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <random>

#include "core/checked_math.h"
#include "disk_file.h"
#include "session_harness.h"

namespace tensorizer::io {
namespace {

using testing::Bytes;
using testing::DiskFile;

constexpr int kUntouched = 0xA5;

// Memory for a list of buffers: each behind the other, with something between them.
struct Places {
  explicit Places(size_t nbytes) : memory(allocate_pages(nbytes)), nbytes(nbytes) {
    std::memset(memory.get(), kUntouched, nbytes);
  }
  Buffer add(uint64_t at, uint64_t n) {
    buffers.emplace_back(memory.get() + at, n);
    return buffers.back();
  }
  // Of the bytes that no buffer has.
  ::testing::AssertionResult rest_is_untouched() {
    for (const Buffer& buffer : buffers) std::memset(buffer.data(), kUntouched, buffer.size());
    const auto all = std::span(memory.get(), nbytes);
    if (all[0] != std::byte{kUntouched}) return ::testing::AssertionFailure() << "the first byte";
    return testing::same(all.subspan(1), all.first(nbytes - 1));
  }

  Pages memory;
  size_t nbytes;
  std::vector<Buffer> buffers;
};

void expect_reads(FileSource& source, const Bytes& content, uint64_t offset, Places& places) {
  source.read_at(offset, places.buffers, {});
  for (const Buffer& buffer : places.buffers) {
    ASSERT_TRUE(testing::same(buffer, std::span(content).subspan(offset, buffer.size())));
    offset += buffer.size();
  }
  ASSERT_TRUE(places.rest_is_untouched());
}

TEST(DirectFile, AnyStretchArrivesAtAnyPlaceAndNothingElseDoes) {
  const Bytes content = testing::random_bytes((11 << 20) + 1234);
  const DiskFile file(content);
  const auto source = file.source(true);
  std::mt19937_64 random(1);
  const auto below = [&](uint64_t n) { return random() % n; };
  for (int round = 0; round < 300; ++round) {
    const uint64_t most = below(3) == 0 ? content.size() : below(2) == 0 ? 64 << 10 : 9000;
    uint64_t offset = below(content.size());
    if (below(3) == 0) offset -= offset % 4096;
    uint64_t left = std::min(below(most) + 1, content.size() - offset);
    if (below(4) == 0) left = std::min(most, content.size() - offset);
    Places places(left * 2 + (uint64_t{2} << 20));
    uint64_t at = 0, from = offset;
    while (left > 0) {
      const uint64_t n = std::min(left, below(3) == 0 ? below(9000) : below(left) + 1);
      const uint64_t free = places.nbytes - left - at;
      // At the same place in its page as in the file, at a page, or anywhere.
      const uint64_t kind = below(3);
      uint64_t to = at + below(std::min<uint64_t>(free, 5000));
      if (kind == 0 && free > 20'000) to = align_up(at, 4096) + from % 4096;
      if (kind == 1 && free > 20'000) to = align_up(at, 4096);
      places.add(to, n);
      at = to + n;
      from += n;
      left -= n;
    }
    ASSERT_NO_FATAL_FAILURE(expect_reads(*source, content, offset, places)) << round;
  }
}

TEST(DirectFile, EdgesOfPagesAndOfCalls) {
  const Bytes content = testing::random_bytes((9 << 20) + 5);
  const DiskFile file(content);
  const auto source = file.source(true);
  constexpr uint64_t kCall = 4 << 20;
  for (const uint64_t begin :
       {uint64_t{0}, uint64_t{1}, uint64_t{4095}, uint64_t{4096}, kCall - 1}) {
    for (const uint64_t n : {uint64_t{1}, uint64_t{4095}, uint64_t{4096}, uint64_t{4097}, kCall - 1,
                             kCall, kCall + 1, kCall + 4096, kCall + 8192, kCall + 8193}) {
      for (const uint64_t in_page : {begin % 4096, uint64_t{0}, uint64_t{8}}) {
        Places places(n + 16384);
        places.add(in_page, n);
        ASSERT_NO_FATAL_FAILURE(expect_reads(*source, content, begin, places)) << begin << " " << n;
      }
    }
  }
  Places to_the_end(content.size());
  to_the_end.add(0, content.size());
  ASSERT_NO_FATAL_FAILURE(expect_reads(*source, content, 0, to_the_end));
  Places last(4096);
  last.add(0, 5);
  ASSERT_NO_FATAL_FAILURE(expect_reads(*source, content, content.size() - 5, last));
}

TEST(DirectFile, LeavesThePageCacheAsItIs) {
  const Bytes content = testing::random_bytes((5 << 20) + 77);
  const DiskFile file(content);
  if (!file.can_be_uncached()) GTEST_SKIP() << "a file system in memory, or without O_DIRECT";
  const auto source = file.source(true);
  Bytes found(content.size() - 100);
  source->read_at(50, Buffer(found), {});
  EXPECT_TRUE(testing::same(found, std::span(content).subspan(50, found.size())));
  EXPECT_LE(file.cached_pages(), testing::kTriedPages);
  EXPECT_EQ(source->bytes_read(), found.size());
  source->set_direct(false);
  source->read_at(50, Buffer(found), {});
  EXPECT_GT(file.cached_pages(), found.size() / 4096 / 2);
}

TEST(DirectFile, SeesWhatWasWrittenAndIsOnNoDiskYet) {
  Bytes content = testing::random_bytes(3 << 20);
  const DiskFile file(content);
  const auto source = file.source(true);
  const Bytes news = testing::random_bytes(100'000, 2);
  ASSERT_EQ(pwrite(file.fd(), news.data(), news.size(), 777), static_cast<ssize_t>(news.size()));
  std::ranges::copy(news, content.begin() + 777);
  Places places(content.size());
  places.add(0, content.size());
  ASSERT_NO_FATAL_FAILURE(expect_reads(*source, content, 0, places));
}

TEST(DirectFile, AFileThatWasCutIsTruncated) {
  const Bytes content = testing::random_bytes(1 << 20);
  const DiskFile file(content);
  const auto source = file.source(true);
  Bytes found(content.size());
  for (const off_t left : {700'000, 8192, 0}) {
    ASSERT_EQ(ftruncate(file.fd(), left), 0);
    const std::string text =
        testing::expect_error(Errc::truncated, [&] { source->read_at(0, Buffer(found), {}); });
    EXPECT_NE(text.find("f is cut short: it ends at byte " + std::to_string(left)),
              std::string::npos)
        << text;
    EXPECT_TRUE(testing::same(std::span(found).first(left), std::span(content).first(left)));
  }
}

TEST(DirectFile, AStopEndsARead) {
  const DiskFile file(testing::random_bytes(1 << 20));
  std::stop_source stop;
  stop.request_stop();
  Bytes found(1 << 20);
  testing::expect_error(Errc::cancelled,
                        [&] { file.source(true)->read_at(0, Buffer(found), stop.get_token()); });
}

TEST(DirectFile, WhatNoDirectReadIsToBeHadOfIsReadAllTheSame) {
  const UniqueFd refusing(open("/proc/self/status", O_RDONLY));
  EXPECT_EQ(DirectFile::open(refusing.get()), nullptr);
  // Addresses that the kernel refuses: what direct reads cannot bring, the others say why.
  const DiskFile file(testing::random_bytes(1 << 20));
  const auto source = file.source(true);
  auto* const nobodys = static_cast<std::byte*>(
      mmap(nullptr, 1 << 20, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  const std::string text =
      testing::expect_error(Errc::io, [&] { source->read_at(0, Buffer(nobodys, 1 << 20), {}); });
  EXPECT_NE(text.find("cannot read f"), std::string::npos) << text;
  munmap(nobodys, 1 << 20);
  Bytes found(1 << 20);
  source->read_at(0, Buffer(found), {});  // refused once, the file is read in the other way
}

TEST(DirectFile, AClosedSourceHasNone) {
  const DiskFile file(testing::random_bytes(100));
  const auto source = file.source(true);
  source->close();
  Bytes found(10);
  testing::expect_error(Errc::invalid_argument, [&] { source->read_at(0, Buffer(found), {}); });
}

}  // namespace
}  // namespace tensorizer::io

namespace tensorizer::tests {
namespace {

// Whole tensors and parts, in clear and encrypted, for the host and through a device's buffers.
TEST(DirectLoads, EveryKindOfLoadFindsTheSameAndLeavesNothingCached) {
  const auto tensors =
      make_tensors({(9 << 20) + 5, 300'000, 7, 0, 123, 4096, (2 << 20) + 1, 20 << 20}, 5);
  for (const bool encrypted : {false, true}) {
    save::SaveOptions options;
    if (encrypted) options = {.hashes = {false, true}, .key = test_key()};
    const testing::DiskFile file(save_all(tensors, options));
    const bool is_cold = file.can_be_uncached();
    const auto source = file.source(true);
    HostEngine engine(6, 8 << 20);
    for (const bool device : {false, true}) {
      for (const bool verify : {false, true}) {
        LoadSettings settings{.verify = verify, .workers = 3};
        if (encrypted) settings.keys = std::make_shared<load::KeyRing>(test_key());
        if (device) settings.engine = &engine;
        std::vector<Bytes> found;
        load_all(*source, settings, found);
        for (size_t i = 0; i < tensors.size(); ++i)
          ASSERT_TRUE(testing::same(found[i], tensors[i].data)) << i;
        load_parts(*source, tensors, settings, verify ? 1 : 2);
      }
    }
    EXPECT_TRUE(!is_cold || file.cached_pages() <= testing::kTriedPages);
  }
}

TEST(ColdLoads, AFileThatIsNotCachedIsReadInStreamsThroughTheCache) {
  const auto tensors = make_tensors({(40 << 20) + 5, 300'000, 7, 0, (2 << 20) + 1, 35 << 20}, 6);
  const testing::DiskFile file(save_all(tensors, {}));
  if (!file.can_be_uncached()) GTEST_SKIP() << "a file system in memory, or without O_DIRECT";
  const auto descriptors = [] {
    return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {});
  };
  const auto source = file.source(false);
  const auto before = descriptors();
  EXPECT_EQ(source->traits().streams, 2U);
  {
    const std::shared_ptr<void> streams = source->open_streams();
    EXPECT_EQ(descriptors(), before + 2);
  }
  HostEngine engine(6, 8 << 20);
  for (const bool device : {false, true}) {
    LoadSettings settings{.verify = device, .workers = 3};
    if (device) settings.engine = &engine;
    std::vector<Bytes> found;
    load_all(*source, settings, found);
    for (size_t i = 0; i < tensors.size(); ++i)
      ASSERT_TRUE(testing::same(found[i], tensors[i].data)) << i;
  }
  EXPECT_EQ(descriptors(), before) << "none is kept after a load";
  EXPECT_EQ(file.source(false)->traits().streams, 1U) << "it is cached now";
}

}  // namespace
}  // namespace tensorizer::tests
