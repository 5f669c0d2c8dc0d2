// The digest of a whole file from the reads of loads, whatever their order.
#include "load/hashed_source.h"

#include <gtest/gtest.h>

#include <thread>
#include <vector>

#include "memory_source.h"

namespace tensorizer::load {
namespace {

std::vector<std::byte> some_bytes(size_t nbytes) {
  std::vector<std::byte> bytes(nbytes);
  uint32_t state = 7;
  for (std::byte& byte : bytes)
    byte = static_cast<std::byte>((state = state * 1664525 + 1013904223) >> 24);
  return bytes;
}

class HashedSourceTest : public ::testing::Test {
 protected:
  digest::Sha256Digest expected() const {
    digest::Sha256 sha256;
    sha256.update(bytes_);
    return sha256.finish();
  }
  void read(uint64_t offset, uint64_t nbytes, const std::stop_token& stop = {}) {
    std::vector<std::byte> into(nbytes);
    source_.read_at(offset, io::Buffer(into), stop);
    EXPECT_TRUE(
        std::equal(into.begin(), into.end(), bytes_.begin() + static_cast<ptrdiff_t>(offset)));
  }

  const std::vector<std::byte> bytes_ = some_bytes(100'000);
  const std::shared_ptr<io::MemorySource> of_ =
      std::make_shared<io::MemorySource>(bytes_, "memory");
  HashedSource source_{of_};
};

TEST_F(HashedSourceTest, WhatNobodyReadIsReadAtTheEnd) {
  read(0, 100);
  EXPECT_EQ(source_.position(), 100);
  EXPECT_EQ(source_.finish({}), expected());
}

TEST_F(HashedSourceTest, ReadsThatNobodyAnnouncedAreHashedOnlyWhereTheyGoOn) {
  read(50'000, 1000);
  EXPECT_EQ(source_.position(), 0);
  read(0, 60);
  read(40, 60);  // half of it again
  EXPECT_EQ(source_.position(), 100);
  read(10, 20);
  EXPECT_EQ(source_.position(), 100);
  EXPECT_EQ(source_.finish({}), expected());
}

TEST_F(HashedSourceTest, AnnouncedReadsWaitForTheirTurnAndGapsAreReadOnce) {
  const std::vector<io::Stretch> stretches{{1000, 20'000}, {30'000, 10'000}, {40'000, 60'000}};
  source_.expect(stretches);
  std::vector<std::thread> threads;
  for (size_t i = stretches.size(); i-- > 0;)
    threads.emplace_back([&, i] { read(stretches[i].offset, stretches[i].nbytes); });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(source_.position(), bytes_.size());
  EXPECT_EQ(source_.bytes_read(), bytes_.size());
  EXPECT_EQ(source_.finish({}), expected());
  EXPECT_EQ(source_.bytes_read(), bytes_.size());
}

TEST_F(HashedSourceTest, AReadThatWaitsEndsWithAStop) {
  const std::vector<io::Stretch> stretches{{0, 10}, {10, 10}};
  source_.expect(stretches);
  std::stop_source stop;
  std::thread waiting([&] {
    std::vector<std::byte> into(10);
    EXPECT_THROW(source_.read_at(10, io::Buffer(into), stop.get_token()), Error);
  });
  stop.request_stop();
  waiting.join();
  EXPECT_EQ(source_.finish({}), expected());
}

TEST_F(HashedSourceTest, ALoadIsToldToTakeItsUnitsInOrder) {
  EXPECT_TRUE(source_.traits().ascending);
  EXPECT_EQ(source_.traits().streams, 1U);
  EXPECT_EQ(source_.view(0, 1), nullptr);
}

}  // namespace
}  // namespace tensorizer::load
