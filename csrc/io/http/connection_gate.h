// How many requests of one source run at the same time. Internally locked.
//
// A fixed number, or one that grows: while all places are taken and bytes arrive at a rate that the
// last doubling improved by a tenth, the number of places doubles; the first doubling that does not
// help is taken back. Far from the server, where much of a request is waiting, it begins higher.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <stop_token>

#include "core/sync.h"

namespace tensorizer::io {

class ConnectionGate {
 public:
  using Clock = std::chrono::steady_clock;

  // `fixed` places if not zero, else a growing number up to `most`. `bytes` counts what arrives and
  // outlives the gate.
  ConnectionGate(unsigned fixed, unsigned most, const std::atomic<uint64_t>& bytes) noexcept;

  // Gives its place back when it dies.
  class Ticket {
   public:
    explicit Ticket(ConnectionGate* gate) noexcept : gate_(gate) {}
    Ticket(const Ticket&) = delete;
    Ticket& operator=(const Ticket&) = delete;
    ~Ticket() { gate_->leave(); }

   private:
    ConnectionGate* gate_;
  };

  // Waits for a place; throws Errc::cancelled on a stop.
  Ticket enter(const std::stop_token& stop);

  // How long the server took to answer, once that is known; before the reads that follow.
  void note_latency(std::chrono::duration<double> latency);

  // Fixes the number of places, 1 to `most`.
  void fix(unsigned places);

  // Places that there may ever be.
  unsigned most() const;
  // True when a place is free and nobody waits for it.
  bool has_idle_place() const;

 private:
  void leave();
  void consider_growth(Clock::time_point now) REQUIRES_LOCK(mutex_);

  const unsigned cap_;
  const std::atomic<uint64_t>& bytes_;
  mutable Mutex mutex_;
  CondVar changed_;
  bool growing_ GUARDED_BY(mutex_);
  unsigned places_ GUARDED_BY(mutex_);
  unsigned taken_ GUARDED_BY(mutex_) = 0;
  unsigned waiting_ GUARDED_BY(mutex_) = 0;
  unsigned places_before_ GUARDED_BY(mutex_) = 0;
  double best_rate_ GUARDED_BY(mutex_) = 0;
  Clock::duration window_ GUARDED_BY(mutex_);
  bool measuring_ GUARDED_BY(mutex_) = false;
  Clock::time_point window_start_ GUARDED_BY(mutex_);
  uint64_t window_bytes_ GUARDED_BY(mutex_) = 0;
};

}  // namespace tensorizer::io
