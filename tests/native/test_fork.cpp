// What a forked child finds of locks, conditions and threads of its parent.
#include "core/fork.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "core/sync.h"
#include "forks.h"
#include "io/http/http_endpoint.h"
#include "io/local/file_source.h"
#include "io/upload/multipart_sink.h"

namespace tensorizer {
namespace {

using testing::ends_well_in_child;

// A thread that holds what `hold` takes, from the constructor to the destructor.
class Holder {
 public:
  explicit Holder(const std::function<void(const std::function<void()>& held)>& hold)
      : thread_([this, hold] {
          hold([this] {
            holds_ = true;
            while (!done_) std::this_thread::yield();
          });
        }) {
    while (!holds_) std::this_thread::yield();
  }
  ~Holder() {
    done_ = true;
    thread_.join();
  }

 private:
  std::atomic<bool> holds_{false};
  std::atomic<bool> done_{false};
  std::thread thread_;
};

TEST(Fork, AChildFindsALockFreeThatAnotherThreadHolds) {
  Mutex mutex;
  const Holder holder([&](const auto& held) {
    MutexLock lock(mutex);
    held();
  });
  EXPECT_TRUE(ends_well_in_child([&] {
    for (int i = 0; i < 2; ++i) MutexLock lock(mutex);
    return true;
  }));
}

TEST(Fork, WhoHoldsALockWhileItForksGivesItBackInTheParentAlone) {
  Mutex mutex;
  auto lock = std::make_unique<MutexLock>(mutex);
  EXPECT_TRUE(ends_well_in_child([&] {
    lock.reset();
    MutexLock again(mutex);
    return true;
  }));
  lock.reset();
  MutexLock again(mutex);
}

TEST(Fork, AChildDestroysAConditionThatOthersWaitFor) {
  Mutex mutex;
  auto condition = std::make_unique<CondVar>();
  bool waits = false;
  bool ends = false;
  std::thread waiter([&] {
    MutexLock lock(mutex);
    waits = true;
    condition->wait(mutex, {}, [&] { return ends; });
  });
  const auto is_waiting = [&] {
    MutexLock lock(mutex);
    return waits;
  };
  while (!is_waiting()) std::this_thread::yield();
  EXPECT_TRUE(ends_well_in_child([&] {
    condition->notify_all();
    condition.reset();
    return true;
  }));
  {
    MutexLock lock(mutex);
    ends = true;
  }
  condition->notify_all();
  waiter.join();
}

TEST(Fork, TheThreadsOfAChildWaitForEachOther) {
  Mutex mutex;
  CondVar condition;
  const Holder holder([&](const auto& held) {
    MutexLock lock(mutex);
    held();
  });
  EXPECT_TRUE(ends_well_in_child([&] {
    int count = 0;
    std::vector<std::thread> threads;
    for (int i = 0; i < 8; ++i)
      threads.emplace_back([&] {
        for (int k = 0; k < 1000; ++k) {
          MutexLock lock(mutex);
          ++count;
        }
        condition.notify_all();
      });
    {
      MutexLock lock(mutex);
      condition.wait(mutex, {}, [&] { return count == 8000; });
    }
    for (std::thread& thread : threads) thread.join();
    return count == 8000;
  }));
}

TEST(Fork, EachProcessHasAValueOfItsOwnAndDestroysNoOther) {
  static std::atomic<int> destroyed{0};
  struct Value {
    ~Value() { destroyed += number; }
    int number = 1;
  };
  auto value = std::make_unique<FreshInChild<Value>>();
  auto unused = std::make_unique<FreshInChild<Value>>();
  (*value)->number = 10;
  const auto is_fresh = [&] { return value->current() == nullptr && (*value)->number == 1; };
  EXPECT_TRUE(ends_well_in_child([&] {
    if (!is_fresh()) return false;
    (*value)->number = 100;
    if (!ends_well_in_child(is_fresh)) return false;
    value.reset();
    unused.reset();
    return destroyed == 100;
  }));
  EXPECT_EQ((*value)->number, 10);
  value.reset();
  EXPECT_EQ(destroyed, 10);
}

TEST(Fork, AChildReadsAFileThatOtherThreadsRead) {
  char path[] = "/tmp/fork-XXXXXX";
  const int fd = mkstemp(path);
  ASSERT_GE(fd, 0);
  const std::vector<std::byte> content(4096, std::byte{7});
  ASSERT_EQ(write(fd, content.data(), content.size()), 4096);
  io::FileSource source(UniqueFd(fd), path);
  std::atomic<bool> ends{false};
  const auto read = [&] {
    std::vector<std::byte> bytes(4096);
    source.read_at(0, io::Buffer(bytes), {});
    return bytes == content;
  };
  std::vector<std::thread> readers;
  for (int i = 0; i < 3; ++i)
    readers.emplace_back([&] {
      while (!ends) EXPECT_TRUE(read());
    });
  for (int i = 0; i < 50; ++i) EXPECT_TRUE(ends_well_in_child(read));
  ends = true;
  for (std::thread& reader : readers) reader.join();
  std::filesystem::remove(path);
}

TEST(Fork, AChildRenewsAnAddressThatAThreadOfItsParentRenews) {
  const pid_t parent = getpid();
  std::atomic<bool> renews{false};
  std::atomic<bool> ends{false};
  io::HttpAddress address;
  address.renew = [&] {
    renews = true;
    while (getpid() == parent && !ends) std::this_thread::yield();
    return std::string("http://host/object");
  };
  io::HttpEndpoint endpoint(address, nullptr);
  std::thread renewer([&] { endpoint.target({}); });
  while (!renews) std::this_thread::yield();
  EXPECT_TRUE(
      ends_well_in_child([&] { return endpoint.target({})->url.text == "http://host/object"; }));
  ends = true;
  renewer.join();
}

class CountingTransport final : public io::MultipartTransport {
 public:
  explicit CountingTransport(std::atomic<int>& stored) : stored_(stored) {}
  void create(const std::stop_token&) override {}
  std::string put_part(int, io::ConstBuffer, const std::stop_token&) override {
    ++stored_;
    return "\"etag\"";
  }
  void complete(const std::vector<std::string>&, const std::stop_token&) override {}
  void abort() noexcept override {}
  void put_object(io::ConstBuffer, const std::stop_token&) override {}

 private:
  std::atomic<int>& stored_;
};

TEST(Fork, AChildDropsAnUploadWhoseThreadsWait) {
  constexpr uint64_t kPart = 256 << 10;
  std::atomic<int> stored{0};
  auto sink = std::make_unique<io::MultipartSink>(
      std::make_unique<CountingTransport>(stored), "object",
      io::MultipartOptions{.uploads = 2, .min_part_nbytes = kPart, .max_part_nbytes = kPart});
  const std::vector<std::byte> bytes(6 * kPart);
  sink->reserve(bytes.size());
  sink->write_at(0, io::ConstBuffer(bytes), {});
  while (stored < 4) std::this_thread::yield();
  std::this_thread::sleep_for(std::chrono::milliseconds(20));  // until they wait, most likely
  EXPECT_TRUE(ends_well_in_child([&] {
    sink.reset();
    return true;
  }));
  sink->publish(bytes.size(), {});
  sink->finish({});
  EXPECT_EQ(stored, 6);
}

}  // namespace
}  // namespace tensorizer
