// How many requests of one source run at the same time: a fixed number, or one that a
// ConnectionTuner finds. Far from the server, where much of a request is waiting, it begins higher.
// Internally locked.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <stop_token>

#include "core/sync.h"
#include "io/http/connection_tuner.h"

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

  // The server said that it is overloaded: fewer requests, where their number is not fixed.
  void note_overload();

  // Fixes the number of places, 1 to `most`.
  void fix(unsigned places);

  // Places that there may ever be.
  unsigned most() const;
  // True when a place is free and nobody waits for it.
  bool has_idle_place() const;

 private:
  void leave();
  void look() REQUIRES_LOCK(mutex_);
  unsigned places() const REQUIRES_LOCK(mutex_) { return fixed_ > 0 ? fixed_ : tuner_.places(); }
  void forget_the_parent() REQUIRES_LOCK(mutex_);

  const unsigned cap_;
  const std::atomic<uint64_t>& bytes_;
  mutable Mutex mutex_;
  CondVar changed_;
  unsigned fixed_ GUARDED_BY(mutex_);  // 0: the tuner's number
  ConnectionTuner tuner_ GUARDED_BY(mutex_);
  Clock::duration window_ GUARDED_BY(mutex_);
  unsigned taken_ GUARDED_BY(mutex_) = 0;
  unsigned waiting_ GUARDED_BY(mutex_) = 0;
  pid_t process_ GUARDED_BY(mutex_);
};

}  // namespace tensorizer::io
