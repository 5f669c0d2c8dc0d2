#include "io/http/connection_tuner.h"

#include <algorithm>

namespace tensorizer::io {
namespace {

constexpr double kWorthIt = 1.1;
constexpr std::chrono::seconds kFirstRest{2};
constexpr std::chrono::seconds kLongestRest{30};
// Requests that ran when the server first said so fail within this time.
constexpr std::chrono::seconds kDeaf{1};

}  // namespace

ConnectionTuner::ConnectionTuner(unsigned first, unsigned most, Clock::duration window) noexcept
    : most_(std::max(1u, most)),
      places_(std::clamp(first, 1u, most_)),
      places_before_(places_),
      window_(window),
      next_rest_(kFirstRest) {}

void ConnectionTuner::begin_at(unsigned first, Clock::duration window) noexcept {
  places_ = std::max(places_, std::min(first, most_));
  window_ = window;
}

void ConnectionTuner::begin_window(Clock::time_point now, uint64_t nbytes) noexcept {
  measuring_ = true;
  window_begin_ = now;
  window_nbytes_ = nbytes;
}

void ConnectionTuner::look(Clock::time_point now, uint64_t nbytes, bool wanted) noexcept {
  if (phase_ == Phase::rest) {
    if (now < rest_until_) return;
    phase_ = Phase::before;
    measuring_ = false;
  }
  // What arrives while places are free says nothing about their number.
  if (!wanted) measuring_ = false;
  if (!wanted || !measuring_) {
    if (wanted) begin_window(now, nbytes);
    return;
  }
  if (now - window_begin_ < window_) return;
  const double seconds = std::chrono::duration<double>(now - window_begin_).count();
  const double rate = static_cast<double>(nbytes - window_nbytes_) / seconds;
  begin_window(now, nbytes);
  judge(now, rate);
}

void ConnectionTuner::judge(Clock::time_point now, double rate) noexcept {
  if (phase_ == Phase::before || rate >= rate_before_ * kWorthIt) {
    if (phase_ == Phase::step) next_rest_ = kFirstRest;
    double_places(rate);
    if (places_ == places_before_) rest(now);
    return;
  }
  // New connections need a while to reach their speed, and any line has bad moments.
  if (!doubted_) {
    doubted_ = true;
    return;
  }
  places_ = places_before_;
  rest(now);
}

void ConnectionTuner::double_places(double rate) noexcept {
  phase_ = Phase::step;
  doubted_ = false;
  rate_before_ = rate;
  places_before_ = places_;
  places_ = std::min(most_, places_ * 2);
}

void ConnectionTuner::rest(Clock::time_point now) noexcept {
  phase_ = Phase::rest;
  rest_until_ = now + next_rest_;
  next_rest_ = std::min<Clock::duration>(next_rest_ * 2, kLongestRest);
}

void ConnectionTuner::overloaded(Clock::time_point now) noexcept {
  if (now < deaf_until_) return;
  deaf_until_ = now + kDeaf;
  places_ = std::max(1u, places_ / 2);
  rest(now);
}

}  // namespace tensorizer::io
