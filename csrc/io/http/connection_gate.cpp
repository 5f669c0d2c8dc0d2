#include "io/http/connection_gate.h"

#include <algorithm>

#include "core/error.h"

namespace tensorizer::io {
namespace {

constexpr unsigned kFirstPlaces = 8;
// Object stores answer after 10 to 100 ms and bound the rate of a connection: a load that begins
// with few connections is half done before it has enough of them.
constexpr unsigned kFirstPlacesFar = 32;
constexpr std::chrono::milliseconds kFar{10};
// Long enough for new connections to reach their speed, short against the load of a model.
constexpr std::chrono::milliseconds kLongestWindow{150};
constexpr std::chrono::milliseconds kShortestWindow{50};
constexpr int kWindowLatencies = 4;
constexpr double kWorthIt = 1.1;

}  // namespace

ConnectionGate::ConnectionGate(unsigned fixed, unsigned most,
                               const std::atomic<uint64_t>& bytes) noexcept
    : cap_(std::max(1u, most)),
      bytes_(bytes),
      growing_(fixed == 0),
      places_(std::min(cap_, fixed == 0 ? kFirstPlaces : fixed)),
      window_(kLongestWindow) {}

void ConnectionGate::note_latency(std::chrono::duration<double> latency) {
  MutexLock lock(mutex_);
  if (!growing_ || latency < kFar) return;
  places_ = std::max(places_, std::min(cap_, kFirstPlacesFar));
  window_ = std::clamp<Clock::duration>(
      std::chrono::duration_cast<Clock::duration>(kWindowLatencies * latency), kShortestWindow,
      kLongestWindow);
  changed_.notify_all();
}

ConnectionGate::Ticket ConnectionGate::enter(const std::stop_token& stop) {
  MutexLock lock(mutex_);
  ++waiting_;
  const auto has_place = [this]() REQUIRES_LOCK(mutex_) { return taken_ < places_; };
  consider_growth(Clock::now());
  // Looks up once per window: requests may last much longer than what is needed to see that more
  // would help.
  while (!changed_.wait_until(mutex_, stop, Clock::now() + window_, has_place)) {
    if (stop.stop_requested()) {
      --waiting_;
      throw Error(Errc::cancelled, "cancelled");
    }
    consider_growth(Clock::now());
  }
  --waiting_;
  ++taken_;
  return Ticket(this);
}

void ConnectionGate::leave() {
  MutexLock lock(mutex_);
  consider_growth(Clock::now());
  --taken_;
  changed_.notify_one();
}

void ConnectionGate::consider_growth(Clock::time_point now) {
  if (!growing_ || places_ == cap_) return;
  const uint64_t bytes = bytes_.load(std::memory_order_relaxed);
  const bool wanted = taken_ >= places_ && waiting_ > 0;
  if (!wanted || !measuring_) {
    measuring_ = wanted;
    window_start_ = now;
    window_bytes_ = bytes;
    return;
  }
  if (now - window_start_ < window_) return;
  const double seconds = std::chrono::duration<double>(now - window_start_).count();
  const double rate = static_cast<double>(bytes - window_bytes_) / seconds;
  window_start_ = now;
  window_bytes_ = bytes;
  if (rate < best_rate_ * kWorthIt) {
    places_ = places_before_;
    growing_ = false;
    return;
  }
  best_rate_ = rate;
  places_before_ = places_;
  places_ = std::min(cap_, places_ * 2);
  changed_.notify_all();
}

void ConnectionGate::fix(unsigned places) {
  MutexLock lock(mutex_);
  growing_ = false;
  places_ = std::clamp(places, 1u, cap_);
  changed_.notify_all();
}

unsigned ConnectionGate::most() const {
  MutexLock lock(mutex_);
  return growing_ ? cap_ : places_;
}

bool ConnectionGate::has_idle_place() const {
  MutexLock lock(mutex_);
  return taken_ < places_ && waiting_ == 0;
}

}  // namespace tensorizer::io
