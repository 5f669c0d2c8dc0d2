// The machine inside CudaCopyEngine: one thread issues copies in the order they were submitted,
// another waits for their events and frees the slots. Internally locked.
//
// Whatever goes wrong, a slot returns to the ring only when the device has let go of it; where the
// driver can no longer tell, the whole ring is given up (Device::condemn_ring).
#pragma once

#include <atomic>
#include <chrono>
#include <deque>
#include <exception>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "core/sync.h"
#include "device/copy_engine.h"
#include "device/cuda/copy_stream.h"
#include "device/cuda/cuda_copy.h"

namespace tensorizer::device::cuda {

// An event in the current context, destroyed with the scope; the driver itself keeps one that is
// still pending.
class ScopedEvent {
 public:
  explicit ScopedEvent(const Driver& driver);
  ScopedEvent(ScopedEvent&& other) noexcept
      : driver_(other.driver_), event_(std::exchange(other.event_, nullptr)) {}
  ScopedEvent& operator=(ScopedEvent&& other) noexcept {
    std::swap(driver_, other.driver_);
    std::swap(event_, other.event_);
    return *this;
  }
  ~ScopedEvent();
  Event get() const noexcept { return event_; }

 private:
  const Driver* driver_;
  Event event_ = nullptr;
};

class CopyPump {
 public:
  explicit CopyPump(const CudaCopyOptions& options);
  ~CopyPump();
  CopyPump(const CopyPump&) = delete;
  CopyPump& operator=(const CopyPump&) = delete;

  PinnedRing& ring() noexcept { return *ring_; }
  unsigned take_slot(const std::stop_token& stop);
  void submit(SlotLease lease, std::span<const CopyPiece> pieces);
  void fetch(unsigned slot, std::span<const CopyPiece> pieces, const std::stop_token& stop);
  void drain();
  void abandon() noexcept;
  void wipe(std::span<const DeviceRange> destinations) noexcept;
  void order_after_caller();
  void cancel() noexcept;
  void wait_until_quiet(std::chrono::milliseconds patience) noexcept;

 private:
  // A fetch that a worker waits for; it lives on that worker's stack.
  struct Ticket {
    bool done = false;
    bool dropped = false;
  };
  struct Request {
    std::optional<ScopedEvent> fence;  // either an event that everything later waits for,
    unsigned slot = 0;                 // or the copies of one slot
    Direction direction = Direction::to_device;
    std::vector<CopyPiece> pieces;
    Ticket* ticket = nullptr;
  };
  struct InFlight {
    unsigned slot;
    Ticket* ticket;
  };

  void start_threads();
  void stop_threads() noexcept;
  void check_pieces(std::span<const CopyPiece> pieces) const;
  [[noreturn]] void throw_why_broken();
  void fail() noexcept;
  void break_off() noexcept;
  void enqueue(Request request);
  bool withdraw(const Ticket& ticket) REQUIRES_LOCK(mutex_);
  bool quiet() const REQUIRES_LOCK(mutex_) {
    return queue_.empty() && !issuing_ && in_flight_.empty();
  }

  void submit_until_closed() noexcept;
  void handle(Request& request) noexcept;
  void issue(const Request& request);
  void wait_for_fence(const ScopedEvent& fence);
  void complete_until_closed() noexcept;
  bool wait_for_copies(unsigned slot) noexcept;
  void end_copies(unsigned slot, Ticket* ticket, bool copied, bool settled) noexcept;

  Device& device_;
  const Driver& driver_;
  const std::shared_ptr<PinnedRing> ring_;
  const Context context_;
  const Stream caller_;
  std::unique_ptr<CopyStream> stream_;
  std::atomic<bool> broken_{
      false};  // failed or cancelled: set under mutex_, also read by waiters of the ring

  Mutex mutex_;
  CondVar work_;    // for the submitter: the queue grew, or waiting has no point any more
  CondVar landed_;  // for the completer: copies are in flight, or no more will be
  CondVar ended_;   // for drain() and fetch(): something ended
  std::deque<Request> queue_ GUARDED_BY(mutex_);
  std::deque<InFlight> in_flight_ GUARDED_BY(mutex_);  // in the order of the stream
  bool issuing_ GUARDED_BY(mutex_) = false;
  bool cancelled_ GUARDED_BY(mutex_) = false;
  bool copies_began_ GUARDED_BY(mutex_) = false;  // since the last fence was asked for
  bool closing_ GUARDED_BY(mutex_) = false;
  bool submitter_ended_ GUARDED_BY(mutex_) = false;
  std::exception_ptr failure_ GUARDED_BY(mutex_);
  std::thread submitter_;
  std::thread completer_;
};

}  // namespace tensorizer::device::cuda
