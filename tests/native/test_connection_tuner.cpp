// The number of connections against links whose best number is known, in virtual time.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>

#include "io/http/connection_tuner.h"

namespace tensorizer::io {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr milliseconds kStep{10};
constexpr double kMB = 1e6;

// Drives a tuner over a link for a while.
class Simulation {
 public:
  // Bytes per second that so many connections bring at a time since the beginning.
  using Link = std::function<double(unsigned places, milliseconds now)>;

  explicit Simulation(Link link, unsigned first = 8, unsigned most = 64)
      : link_(std::move(link)), tuner(first, most, milliseconds(150)) {}

  void run(milliseconds time) {
    for (milliseconds end = now_ + time; now_ < end; now_ += kStep) {
      bytes_ += link_(tuner.places(), now_) * static_cast<double>(kStep.count()) / 1000;
      tuner.look(at(now_), static_cast<uint64_t>(bytes_), wanted);
      time_at_[tuner.places()] += kStep;
      most_ = std::max(most_, tuner.places());
    }
  }
  void overload() { tuner.overloaded(at(now_)); }

  // The number that was used for most of the time since the last call.
  unsigned usual() {
    const auto longest =
        std::max_element(time_at_.begin(), time_at_.end(),
                         [](const auto& a, const auto& b) { return a.second < b.second; });
    const unsigned number = longest->first;
    time_at_.clear();
    return number;
  }
  unsigned most() const { return most_; }

 private:
  static ConnectionTuner::Clock::time_point at(milliseconds time) {
    return ConnectionTuner::Clock::time_point(seconds(1000) + time);
  }

  Link link_;
  double bytes_ = 0;
  milliseconds now_{0};
  std::map<unsigned, milliseconds> time_at_;
  unsigned most_ = 0;

 public:
  ConnectionTuner tuner;
  bool wanted = true;
};

// `each` bytes per second for a connection, `all` for the line.
Simulation::Link line(double each, double all) {
  return [=](unsigned places, milliseconds) { return std::min(each * places, all); };
}

TEST(ConnectionTuner, finds_the_number_that_fills_the_line) {
  struct Case {
    double each;
    double all;
    unsigned best;
  };
  for (const Case& link : {Case{100 * kMB, 500 * kMB, 8}, Case{50 * kMB, 700 * kMB, 16},
                           Case{50 * kMB, 1100 * kMB, 32}, Case{50 * kMB, 9000 * kMB, 64}}) {
    Simulation simulation(line(link.each, link.all));
    simulation.run(seconds(2));
    EXPECT_EQ(simulation.tuner.places(), link.best) << link.all;
    simulation.usual();
    simulation.run(seconds(60));
    EXPECT_EQ(simulation.usual(), link.best) << link.all;
  }
}

TEST(ConnectionTuner, the_last_doubling_is_judged_as_well) {
  // 64 connections bring less than 32: the server drops what is above.
  Simulation simulation(
      [](unsigned places, milliseconds) { return places > 32 ? 400 * kMB : 50 * kMB * places; });
  simulation.run(seconds(60));
  EXPECT_EQ(simulation.most(), 64u);
  EXPECT_EQ(simulation.usual(), 32u);
}

TEST(ConnectionTuner, one_bad_moment_costs_little) {
  // The line stands still for 200 ms, in any phase of the growth.
  for (milliseconds pause = milliseconds(0); pause < milliseconds(1500);
       pause += milliseconds(50)) {
    Simulation simulation([pause](unsigned places, milliseconds now) {
      const bool still = now >= pause && now < pause + milliseconds(200);
      return still ? 0.0 : 50 * kMB * places;
    });
    simulation.run(seconds(6));
    EXPECT_EQ(simulation.tuner.places(), 64u) << pause.count();
  }
}

TEST(ConnectionTuner, a_line_that_gets_faster_is_noticed) {
  Simulation simulation([](unsigned places, milliseconds now) {
    return std::min(50 * kMB * places, now < seconds(10) ? 400 * kMB : 3000 * kMB);
  });
  simulation.run(seconds(10));
  EXPECT_EQ(simulation.usual(), 8u);
  simulation.run(seconds(40));
  EXPECT_EQ(simulation.usual(), 64u);
}

TEST(ConnectionTuner, an_overloaded_server_gets_half_and_is_asked_again_later) {
  Simulation simulation(line(50 * kMB, 9000 * kMB), 32, 32);
  simulation.run(seconds(1));
  simulation.overload();
  simulation.overload();  // of the same moment
  EXPECT_EQ(simulation.tuner.places(), 16u);
  simulation.run(milliseconds(1100));
  simulation.overload();
  EXPECT_EQ(simulation.tuner.places(), 8u);
  simulation.run(seconds(30));
  EXPECT_EQ(simulation.tuner.places(), 32u);
}

TEST(ConnectionTuner, a_server_that_limits_requests_is_not_pushed_over_it_for_long) {
  Simulation simulation(line(50 * kMB, 9000 * kMB));
  int refused = 0;
  for (int i = 0; i < 12'000; ++i) {  // two minutes
    simulation.run(kStep);
    if (simulation.tuner.places() > 20) {
      simulation.overload();
      ++refused;
    }
  }
  EXPECT_LE(simulation.usual(), 16u);
  EXPECT_LT(refused, 200);  // steps of 10 ms
}

TEST(ConnectionTuner, never_goes_below_one_or_above_the_bound) {
  Simulation simulation(line(50 * kMB, 9000 * kMB), 8, 20);
  simulation.run(seconds(10));
  EXPECT_EQ(simulation.tuner.places(), 20u);
  for (int i = 0; i < 10; ++i) {
    simulation.overload();
    simulation.run(milliseconds(1100));
  }
  EXPECT_EQ(simulation.tuner.places(), 1u);
}

TEST(ConnectionTuner, what_arrives_while_places_are_free_is_not_judged) {
  Simulation simulation(line(50 * kMB, 9000 * kMB));
  simulation.wanted = false;
  simulation.run(seconds(10));
  EXPECT_EQ(simulation.tuner.places(), 8u);
  simulation.wanted = true;
  simulation.run(seconds(2));
  EXPECT_EQ(simulation.tuner.places(), 64u);
}

}  // namespace
}  // namespace tensorizer::io
