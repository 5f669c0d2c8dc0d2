// How many requests should run at the same time: as many as bring more bytes. Pure: time and bytes
// are arguments. Confined to the lock of its owner.
//
// The number doubles, and every doubling is measured: where it brings less than a tenth more than
// before, twice in a row, it is taken back, and tried again after a while that grows. A server that
// says that it is overloaded halves the number.
#pragma once

#include <chrono>
#include <cstdint>

namespace tensorizer::io {

class ConnectionTuner {
 public:
  using Clock = std::chrono::steady_clock;

  // From `first` places to `most`, measured over `window`.
  ConnectionTuner(unsigned first, unsigned most, Clock::duration window) noexcept;

  unsigned places() const noexcept { return places_; }

  // Begins at `first` places or more, before the first look.
  void begin_at(unsigned first, Clock::duration window) noexcept;

  // To be called now and then: `nbytes` have arrived by `now`; `wanted` when all places are taken
  // and more would be.
  void look(Clock::time_point now, uint64_t nbytes, bool wanted) noexcept;

  // A server said so at `now`.
  void overloaded(Clock::time_point now) noexcept;

 private:
  // before: what the present number brings; step: what the doubled one does; rest: neither.
  enum class Phase : uint8_t { before, step, rest };

  void begin_window(Clock::time_point now, uint64_t nbytes) noexcept;
  void judge(Clock::time_point now, double rate) noexcept;
  void double_places(double rate) noexcept;
  void rest(Clock::time_point now) noexcept;

  unsigned most_;
  unsigned places_;
  unsigned places_before_;
  Clock::duration window_;
  Phase phase_ = Phase::before;
  bool measuring_ = false;
  bool doubted_ = false;  // the step has failed one window
  double rate_before_ = 0;
  Clock::time_point window_begin_;
  uint64_t window_nbytes_ = 0;
  Clock::time_point rest_until_;
  Clock::duration next_rest_;
  Clock::time_point deaf_until_;  // one overload makes many requests fail
};

}  // namespace tensorizer::io
