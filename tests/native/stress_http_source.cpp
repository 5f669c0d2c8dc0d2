// HttpSource under many threads, broken bodies and stops, against a small server of this process;
// for the sanitizers.
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <mutex>
#include <random>
#include <set>
#include <thread>

#include "core/error.h"
#include "core/task_group.h"
#include "io/http/http_put.h"
#include "io/http/http_source.h"
#include "io/range_source.h"

namespace tensorizer::io {
namespace {

using std::chrono::milliseconds;

// The bytes of every object here: the first `size` of these.
const std::vector<std::byte>& content() {
  static const std::vector<std::byte>& bytes = [] {
    auto* made = new std::vector<std::byte>(4'000'000);
    for (size_t i = 0; i < made->size(); ++i)
      (*made)[i] = static_cast<std::byte>((i * 2654435761u) >> 13);
    return std::ref(*made);
  }();
  return bytes;
}

// Answers ranges of an object of `size` bytes; every `cut_every`th body breaks off. A thread per
// connection.
class RangeServer {
 public:
  RangeServer(uint64_t size, unsigned cut_every, bool stalls = false)
      : size_(size),
        cut_every_(cut_every),
        stalls_(stalls),
        listener_(socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof address;
    if (bind(listener_, reinterpret_cast<sockaddr*>(&address), length) != 0 ||
        listen(listener_, 64) != 0)
      throw std::runtime_error("no port");
    getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &length);
    port_ = ntohs(address.sin_port);
    acceptor_ = std::thread([this] { accept_all(); });
  }

  ~RangeServer() {
    ending_ = true;
    shutdown(listener_, SHUT_RDWR);
    acceptor_.join();
    {
      std::lock_guard lock(mutex_);
      for (const int connection : open_) shutdown(connection, SHUT_RDWR);
    }
    for (std::thread& thread : threads_) thread.join();
    close(listener_);
  }

  std::string url() const { return "http://127.0.0.1:" + std::to_string(port_) + "/object"; }

 private:
  void accept_all() {
    for (;;) {
      const int connection = accept(listener_, nullptr, nullptr);
      if (connection < 0) return;
      {
        std::lock_guard lock(mutex_);
        open_.insert(connection);
      }
      threads_.emplace_back([this, connection] {
        while (!ending_ && answer(connection)) {
        }
        {
          std::lock_guard lock(mutex_);
          open_.erase(connection);
        }
        close(connection);
      });
    }
  }

  static bool send_all(int connection, const char* data, size_t nbytes) {
    while (nbytes > 0) {
      const ssize_t sent = send(connection, data, nbytes, MSG_NOSIGNAL);
      if (sent <= 0) return false;
      data += sent;
      nbytes -= static_cast<size_t>(sent);
    }
    return true;
  }

  bool answer(int connection) {
    std::string request;
    char c = 0;
    while (!request.ends_with("\r\n\r\n")) {
      if (recv(connection, &c, 1, 0) != 1) return false;
      request += c;
    }
    if (request.starts_with("PUT")) return answer_put(connection, request);
    unsigned long long first = 0;
    unsigned long long last = 0;
    const size_t at = request.find("Range: bytes=");
    if (at == std::string::npos ||
        std::sscanf(request.c_str() + at, "Range: bytes=%llu-%llu", &first, &last) != 2)
      return false;
    last = std::min<unsigned long long>(last, size_ - 1);
    const unsigned number = requests_.fetch_add(1);
    if (stalls_ && number > 0) {
      while (!ending_) std::this_thread::sleep_for(milliseconds(5));
      return false;
    }
    std::string head = "HTTP/1.1 206 Partial Content\r\nETag: \"x\"\r\nContent-Range: bytes " +
                       std::to_string(first) + "-" + std::to_string(last) + "/" +
                       std::to_string(size_) +
                       "\r\nContent-Length: " + std::to_string(last - first + 1) + "\r\n\r\n";
    if (!send_all(connection, head.data(), head.size())) return false;
    const bool cut = cut_every_ > 0 && number % cut_every_ == cut_every_ - 1;
    const uint64_t end = cut ? first + (last - first + 1) / 2 : last + 1;
    const char* body = reinterpret_cast<const char*>(content().data());
    return send_all(connection, body + first, end - first) && !cut;
  }

  bool answer_put(int connection, const std::string& request) {
    unsigned long long left = 0;
    std::sscanf(request.c_str() + request.find("Content-Length:"), "Content-Length: %llu", &left);
    std::vector<char> buffer(64 << 10);
    uint64_t offset = 0;
    while (left > 0) {
      const ssize_t got = recv(connection, buffer.data(), std::min<size_t>(buffer.size(), left), 0);
      if (got <= 0) return false;
      if (std::memcmp(buffer.data(), content().data() + offset, static_cast<size_t>(got)) != 0)
        return false;
      offset += static_cast<size_t>(got);
      left -= static_cast<size_t>(got);
    }
    const std::string reply = "HTTP/1.1 200 OK\r\nETag: \"put\"\r\nContent-Length: 0\r\n\r\n";
    return send_all(connection, reply.data(), reply.size());
  }

  const uint64_t size_;
  const unsigned cut_every_;
  const bool stalls_;
  const int listener_;
  uint16_t port_ = 0;
  std::atomic<bool> ending_{false};
  std::atomic<unsigned> requests_{0};
  std::mutex mutex_;
  std::set<int> open_;
  std::vector<std::thread> threads_;  // of the acceptor until it has ended
  std::thread acceptor_;
};

// Threads that outlast the tests would count as leaks.
class EndsReactor : public testing::Environment {
  void TearDown() override { HttpReactor::of_process().shut_down(); }
};
[[maybe_unused]] const auto* const ends_reactor =
    testing::AddGlobalTestEnvironment(new EndsReactor);

HttpOptions quick_options() {
  HttpOptions options;
  options.head_nbytes = 1000;
  options.unit_nbytes = 64 << 10;
  options.retry.first_delay = milliseconds(1);
  options.retry.max_delay = milliseconds(5);
  options.retry.retries = 20;
  options.proxy = "";
  return options;
}

bool is_content(std::span<const std::byte> bytes, uint64_t offset) {
  return std::memcmp(bytes.data(), content().data() + offset, bytes.size()) == 0;
}

TEST(StressHttpSource, ManyThreadsReadTheRightBytesOverBodiesThatBreak) {
  constexpr uint64_t kSize = 3'000'000;
  RangeServer server(kSize, 4);
  const auto source =
      HttpSource::open({server.url(), {}, {}, {}}, quick_options(), 0, std::nullopt, {});
  TaskGroup group;
  for (unsigned reader = 0; reader < 8; ++reader) {
    group.spawn([&, reader](const std::stop_token& stop) {
      std::minstd_rand random(reader);
      std::vector<std::byte> buffer(90'000);
      for (int i = 0; i < 25; ++i) {
        const uint64_t offset = random() % (kSize - buffer.size());
        const Buffer whole(buffer);
        const std::vector<Buffer> buffers{whole.first(1 + random() % 1000), Buffer(),
                                          whole.subspan(2000)};
        source->read_at(offset, buffers, stop);
        EXPECT_TRUE(is_content(buffers[0], offset));
        EXPECT_TRUE(is_content(buffers[2], offset + buffers[0].size()));
      }
    });
  }
  group.join();
  EXPECT_GT(source->requests(), 200u);
}

TEST(StressHttpSource, OneLargeReadIsSpreadOverConnections) {
  constexpr uint64_t kSize = 4'000'000;
  RangeServer server(kSize, 7);
  const auto source =
      HttpSource::open({server.url(), {}, {}, {}}, quick_options(), 0, std::nullopt, {});
  std::vector<std::byte> buffer(kSize);
  read_parallel(*source, 0, buffer, {});
  EXPECT_TRUE(is_content(buffer, 0));
  EXPECT_GT(source->connections(), 1u);
}

TEST(StressHttpSource, AStopEndsReadsThatWaitAndNothingWritesAfterwards) {
  RangeServer server(1'000'000, 0, /*stalls=*/true);
  const auto source =
      HttpSource::open({server.url(), {}, {}, {}}, quick_options(), 0, std::nullopt, {});
  std::vector<std::byte> buffer(500'000);
  std::stop_source stop;
  std::jthread stopper([&] {
    std::this_thread::sleep_for(milliseconds(100));
    stop.request_stop();
  });
  const auto start = std::chrono::steady_clock::now();
  try {
    read_parallel(*source, 100'000, buffer, stop.get_token());
    FAIL() << "the stop was ignored";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Errc::cancelled);
  }
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));
  std::fill(buffer.begin(), buffer.end(), std::byte{7});
  std::this_thread::sleep_for(milliseconds(50));
  EXPECT_TRUE(
      std::all_of(buffer.begin(), buffer.end(), [](std::byte b) { return b == std::byte{7}; }));
}

TEST(StressHttpSource, SourcesThatComeAndGoStartTheThreadsAgain) {
  RangeServer server(1'000'000, 5);
  TaskGroup group;
  for (unsigned reader = 0; reader < 4; ++reader) {
    group.spawn([&, reader](const std::stop_token& stop) {
      std::vector<std::byte> buffer(50'000);
      for (unsigned i = 0; i < 8; ++i) {
        const auto source =
            HttpSource::open({server.url(), {}, {}, {}}, quick_options(), 0, std::nullopt, stop);
        source->read_at(2'000 + 100 * reader, buffer, stop);
        EXPECT_TRUE(is_content(buffer, 2'000 + 100 * reader));
        if (i % 4 == 3) std::this_thread::sleep_for(milliseconds(150 + 40 * reader));
      }
    });
  }
  group.join();
}

TEST(StressHttpSource, TheEndOfTheThreadsEndsRequestsWithAnError) {
  RangeServer server(1'000'000, 0, /*stalls=*/true);
  HttpOptions options = quick_options();
  options.retry.retries = 0;
  const auto source = HttpSource::open({server.url(), {}, {}, {}}, options, 0, std::nullopt, {});
  std::jthread ender([&] {
    std::this_thread::sleep_for(milliseconds(100));
    HttpReactor::of_process().shut_down();
  });
  std::vector<std::byte> buffer(50'000);
  EXPECT_THROW(source->read_at(2'000, buffer, {}), Error);
}

TEST(StressHttpSource, AddressesAreRenewedByOneThreadAtATime) {
  RangeServer server(1'000'000, 0);
  std::atomic<int> inside{0};
  std::atomic<int> calls{0};
  HttpAddress address{"", {}, std::chrono::seconds(0), "object"};
  address.renew = [&] {
    EXPECT_EQ(inside.fetch_add(1), 0);
    calls.fetch_add(1);
    std::this_thread::sleep_for(milliseconds(2));
    inside.fetch_sub(1);
    return server.url();
  };
  HttpEndpoint endpoint(address, nullptr);
  TaskGroup group;
  for (int i = 0; i < 8; ++i) {
    group.spawn([&](const std::stop_token& stop) {
      for (int k = 0; k < 50; ++k) {
        const HttpEndpoint::SharedTarget target = endpoint.target(stop);
        if (k % 10 == 0) {
          EXPECT_TRUE(endpoint.refused(*target, 403));
        }
      }
    });
  }
  group.join();
  EXPECT_LE(calls.load(), 8 * 5 + 1);
  EXPECT_EQ(endpoint.name(), "object");
}

TEST(StressHttpPut, UploadsFromSeveralThreadsArriveWhole) {
  RangeServer server(1, 0);
  HttpUploader uploader(quick_options());
  const ConstBuffer body = ConstBuffer(content()).first(300'000);
  TaskGroup group;
  for (int i = 0; i < 6; ++i) {
    group.spawn([&](const std::stop_token& stop) {
      for (int k = 0; k < 5; ++k) {
        const HttpPut put{[&] { return HttpPut::Target{server.url()}; }, nullptr, "", body};
        EXPECT_EQ(find_field(http_put(uploader, put, stop).headers, "etag"), "\"put\"");
      }
    });
  }
  group.join();
}

}  // namespace
}  // namespace tensorizer::io
