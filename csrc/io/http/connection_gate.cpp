#include "io/http/connection_gate.h"

#include <unistd.h>

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

}  // namespace

ConnectionGate::ConnectionGate(unsigned fixed, unsigned most,
                               const std::atomic<uint64_t>& bytes) noexcept
    : cap_(std::max(1u, most)),
      bytes_(bytes),
      fixed_(std::min(cap_, fixed)),
      tuner_(kFirstPlaces, cap_, kLongestWindow),
      window_(kLongestWindow),
      process_(getpid()) {}

void ConnectionGate::note_latency(std::chrono::duration<double> latency) {
  MutexLock lock(mutex_);
  if (latency < kFar) return;
  window_ = std::clamp<Clock::duration>(
      std::chrono::duration_cast<Clock::duration>(kWindowLatencies * latency), kShortestWindow,
      kLongestWindow);
  tuner_.begin_at(kFirstPlacesFar, window_);
  changed_.notify_all();
}

// Threads that held places of a parent are not here to give them back.
void ConnectionGate::forget_the_parent() {
  if (process_ == getpid()) return;
  process_ = getpid();
  taken_ = 0;
  waiting_ = 0;
}

ConnectionGate::Ticket ConnectionGate::enter(const std::stop_token& stop) {
  MutexLock lock(mutex_);
  forget_the_parent();
  ++waiting_;
  const auto has_place = [this]() REQUIRES_LOCK(mutex_) { return taken_ < places(); };
  look();
  // Looks up once per window: requests may last much longer than what is needed to see that more
  // would help.
  while (!changed_.wait_until(mutex_, stop, Clock::now() + window_, has_place)) {
    if (stop.stop_requested()) {
      --waiting_;
      throw Error(Errc::cancelled, "cancelled");
    }
    look();
  }
  --waiting_;
  ++taken_;
  return Ticket(this);
}

void ConnectionGate::leave() {
  MutexLock lock(mutex_);
  look();
  if (taken_ > 0) --taken_;  // 0 in a child that was forked meanwhile
  changed_.notify_one();
}

void ConnectionGate::look() {
  if (fixed_ > 0) return;
  const unsigned before = tuner_.places();
  tuner_.look(Clock::now(), bytes_.load(std::memory_order_relaxed),
              taken_ >= before && waiting_ > 0);
  if (tuner_.places() > before) changed_.notify_all();
}

void ConnectionGate::note_overload() {
  MutexLock lock(mutex_);
  tuner_.overloaded(Clock::now());
}

void ConnectionGate::fix(unsigned places) {
  MutexLock lock(mutex_);
  fixed_ = std::clamp(places, 1u, cap_);
  changed_.notify_all();
}

unsigned ConnectionGate::most() const {
  MutexLock lock(mutex_);
  return fixed_ > 0 ? fixed_ : cap_;
}

bool ConnectionGate::has_idle_place() const {
  MutexLock lock(mutex_);
  return taken_ < places() && waiting_ == 0;
}

}  // namespace tensorizer::io
