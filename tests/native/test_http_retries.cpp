// Outages of minutes in virtual time: requests of HTTP and Redis go on when the server comes back,
// and end when it does not.
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <functional>
#include <thread>

#include "core/error.h"
#include "io/http/http_client.h"
#include "io/redis/redis_source.h"
#include "virtual_clock.h"

namespace tensorizer::io {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

HttpFailure refused() {
  HttpFailure failure{Errc::io, "Connection refused", "check that the server runs"};
  failure.transient = true;
  return failure;
}

HttpFailure status_503() {
  HttpFailure failure{Errc::io, "HTTP/1.1 503", "", 503};
  failure.transient = true;
  return failure;
}

class HttpRetries : public testing::Test {
 protected:
  HttpRetries() { options.retry.clock = &time.clock; }

  // Repeats a try that fails as `outcome` has it; returns what the caller is told, or "".
  std::string run(const std::function<std::optional<HttpFailure>()>& outcome) {
    try {
      with_http_retries(
          options, counters,
          [&] {
            if (auto failure = outcome()) throw *failure;
          },
          [] { return uint64_t{0}; },
          [](const HttpFailure& failure, int tries) {
            return to_error(failure, "Failed to read", "object", tries, std::nullopt);
          },
          {});
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  }

  VirtualClock time;
  HttpOptions options;
  HttpCounters counters;
};

TEST_F(HttpRetries, AServerThatGoesAwayForTwentySecondsIsWaitedFor) {
  counters.answered = true;
  EXPECT_EQ(run([&]() -> std::optional<HttpFailure> {
              if (time.elapsed() < seconds(20)) return refused();
              return std::nullopt;
            }),
            "");
  EXPECT_LT(time.elapsed(), seconds(40));
}

TEST_F(HttpRetries, AServerThatIsOverloadedForThirtySecondsIsWaitedFor) {
  EXPECT_EQ(run([&]() -> std::optional<HttpFailure> {
              if (time.elapsed() < seconds(30)) return status_503();
              return std::nullopt;
            }),
            "");
}

TEST_F(HttpRetries, OneThatDoesNotComeBackIsGivenUpAfterTwoMinutes) {
  counters.answered = true;
  EXPECT_NE(run([] { return refused(); }).find("Connection refused (after "), std::string::npos);
  EXPECT_EQ(time.elapsed(), seconds(120));
}

TEST_F(HttpRetries, OneThatNeverAnsweredIsGivenUpAfterTenSecondsWithAHint) {
  const std::string told = run([] { return refused(); });
  EXPECT_EQ(time.elapsed(), seconds(10));
  EXPECT_NE(told.find("check that the server runs"), std::string::npos) << told;
  EXPECT_NE(told.find(kNeverAnsweredHint), std::string::npos) << told;
}

TEST_F(HttpRetries, OneThatTakesARequestAndStaysSilentIsGivenUpAfterOneStallWithAHint) {
  const HttpFailure stall{.reason = "stalled", .transient = true, .silent = true};
  int tries = 0;
  const auto fail = [&] {
    ++tries;
    return stall;
  };
  const std::string told = run(fail);
  EXPECT_EQ(tries, 1);
  EXPECT_EQ(time.elapsed(), seconds(0));
  EXPECT_NE(told.find(kNeverAnsweredHint), std::string::npos) << told;
}

TEST_F(HttpRetries, OneThatHasAnsweredMayBeSilentForTwoMinutes) {
  counters.answered = true;
  const HttpFailure stall{.reason = "stalled", .transient = true, .silent = true};
  const std::string told = run([&] { return stall; });
  EXPECT_EQ(time.elapsed(), seconds(120));
  EXPECT_EQ(told.find(kNeverAnsweredHint), std::string::npos) << told;
}

TEST_F(HttpRetries, WhatARenewalThrowsIsWhatTheCallerSeesInTheEnd) {
  HttpFailure failure{Errc::io, "no fresh URL", ""};
  failure.transient = true;
  failure.reached = true;
  failure.cause = std::make_exception_ptr(Error(Errc::invalid_argument, "no credentials"));
  EXPECT_EQ(run([&] { return failure; }), "no credentials");
  EXPECT_EQ(time.elapsed(), seconds(120));
}

// Answers every command with what `reply` says, one connection after the other.
class LineServer {
 public:
  explicit LineServer(std::function<std::string(const std::string&)> reply)
      : reply_(std::move(reply)), listener_(socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof address;
    bind(listener_, reinterpret_cast<sockaddr*>(&address), length);
    listen(listener_, 16);
    getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &length);
    port = ntohs(address.sin_port);
    thread_ = std::thread([this] { serve(); });
  }
  ~LineServer() {
    shutdown(listener_, SHUT_RDWR);
    thread_.join();
    close(listener_);
  }

  uint16_t port = 0;

 private:
  void serve() {
    for (;;) {
      const int connection = accept(listener_, nullptr, nullptr);
      if (connection < 0) return;
      char buffer[4096];
      for (ssize_t n = 0; (n = recv(connection, buffer, sizeof buffer, 0)) > 0;) {
        const std::string answer = reply_(std::string(buffer, static_cast<size_t>(n)));
        if (answer.empty()) break;
        send(connection, answer.data(), answer.size(), MSG_NOSIGNAL);
      }
      close(connection);
    }
  }

  std::function<std::string(const std::string&)> reply_;
  int listener_;
  std::thread thread_;
};

class RedisRetries : public testing::Test {
 protected:
  RedisOptions options_for(uint16_t port) {
    RedisOptions options;
    options.socket.host = "127.0.0.1";
    options.socket.port = port;
    options.retry.clock = &time.clock;
    return options;
  }
  VirtualClock time;
};

TEST_F(RedisRetries, AServerThatIsLoadingForAMinuteIsWaitedFor) {
  LineServer server([this](const std::string& command) -> std::string {
    if (time.elapsed() < seconds(60)) return "-LOADING Redis is loading the dataset in memory\r\n";
    if (command.find("SCAN") != std::string::npos) return "*2\r\n$1\r\n0\r\n*1\r\n$5\r\np:a:0\r\n";
    return ":7\r\n";
  });
  RedisSource source(options_for(server.port), "p", {});
  EXPECT_EQ(source.end(), 7u);
  EXPECT_LT(time.elapsed(), seconds(80));
}

TEST_F(RedisRetries, OneThatNeverAnswersIsGivenUpAfterTenSecondsWithAHint) {
  LineServer server([](const std::string&) { return std::string(); });
  try {
    RedisSource source(options_for(server.port), "p", {});
    FAIL() << "there was no server";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Errc::io);
    EXPECT_NE(std::string(error.what()).find(kNeverAnsweredHint), std::string::npos)
        << error.what();
  }
  EXPECT_EQ(time.elapsed(), seconds(10));
}

TEST_F(RedisRetries, OneThatStopsAnsweringIsGivenUpAfterTwoMinutes) {
  bool there = true;
  LineServer server([&there](const std::string& command) -> std::string {
    if (!there) return "";
    if (command.find("SCAN") != std::string::npos) return "*2\r\n$1\r\n0\r\n*1\r\n$5\r\np:a:0\r\n";
    return ":7\r\n";
  });
  RedisSource source(options_for(server.port), "p", {});
  there = false;
  std::vector<std::byte> bytes(7);
  EXPECT_THROW(source.read_at(0, Buffer(bytes), {}), Error);
  EXPECT_EQ(time.elapsed(), seconds(120));
}

}  // namespace
}  // namespace tensorizer::io
