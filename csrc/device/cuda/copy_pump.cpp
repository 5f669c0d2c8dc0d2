#include "device/cuda/copy_pump.h"

#include <algorithm>
#include <string>
#include <system_error>

namespace tensorizer::device::cuda {
namespace {

constexpr std::chrono::microseconds kFirstPoll{20};
constexpr std::chrono::microseconds kLongestPoll{1000};

}  // namespace

ScopedEvent::ScopedEvent(const Driver& driver) : driver_(&driver) {
  check(driver, driver.cuEventCreate(&event_, kEventBlockingSync | kEventDisableTiming),
        "creating a CUDA event");
}

ScopedEvent::~ScopedEvent() {
  if (event_) static_cast<void>(driver_->cuEventDestroy(event_));
}

CopyPump::CopyPump(const CudaCopyOptions& options)
    : device_(Device::get(options.device)),
      driver_(device_.driver()),
      ring_(device_.use_ring(options.ring)),
      context_(device_.context()),
      caller_(reinterpret_cast<Stream>(options.caller_stream)) {
  const ContextGuard current(driver_, context_);
  try {
    stream_ = std::make_unique<CopyStream>(device_, options.scatter_kernel);
    order_after_caller();
    start_threads();
  } catch (...) {
    queue_.clear();  // here, while the context is current
    stream_.reset();
    throw;
  }
}

CopyPump::~CopyPump() {
  stop_threads();
  try {
    const ContextGuard current(driver_, context_);
    stream_.reset();
  } catch (const Error&) {
    static_cast<void>(stream_.release());  // the driver is gone: so is the stream
  }
}

void CopyPump::start_threads() {
  try {
    submitter_ = std::thread([this] { submit_until_closed(); });
    completer_ = std::thread([this] { complete_until_closed(); });
  } catch (const std::system_error& error) {
    stop_threads();
    throw Error(Errc::out_of_memory,
                device_.label() + ": cannot start a thread for copies: " + error.what());
  }
}

void CopyPump::stop_threads() noexcept {
  {
    MutexLock lock(mutex_);
    closing_ = true;
    broken_.store(true);
  }
  work_.notify_all();
  ended_.notify_all();
  if (submitter_.joinable()) submitter_.join();
  landed_.notify_all();
  if (completer_.joinable()) completer_.join();
}

unsigned CopyPump::take_slot(const std::stop_token& stop) {
  if (const auto slot = ring_->slots().take(stop, broken_)) return *slot;
  throw_why_broken();
}

void CopyPump::throw_why_broken() {
  {
    MutexLock lock(mutex_);
    if (failure_) std::rethrow_exception(failure_);
  }
  if (ring_->slots().closed())
    throw Error(Errc::device,
                device_.label() + ": its staging memory was given up after another copy failed");
  throw Error(Errc::cancelled, "cancelled");
}

// REQUIRES: called from a catch block. The first failure is the one that everybody gets to see.
void CopyPump::fail() noexcept {
  std::exception_ptr error = std::current_exception();
  try {
    throw;
  } catch (const Error& e) {
    error = std::make_exception_ptr(Error(e.code(), device_.label() + ": " + e.what()));
  } catch (...) {
  }
  {
    MutexLock lock(mutex_);
    if (!failure_) failure_ = std::move(error);
    broken_.store(true);
  }
  work_.notify_all();
  ended_.notify_all();
  ring_->slots().wake_all();
}

void CopyPump::break_off() noexcept {
  {
    MutexLock lock(mutex_);
    broken_.store(true);
  }
  work_.notify_all();
  ended_.notify_all();
  ring_->slots().wake_all();
}

void CopyPump::cancel() noexcept {
  {
    MutexLock lock(mutex_);
    cancelled_ = true;
  }
  break_off();
}

void CopyPump::abandon() noexcept {
  break_off();
  MutexLock lock(mutex_);
  ended_.wait(mutex_, {}, [&]() REQUIRES_LOCK(mutex_) { return quiet(); });
}

void CopyPump::check_pieces(std::span<const CopyPiece> pieces) const {
  const uint64_t limit = ring_->settings().slot_nbytes;
  for (const CopyPiece& piece : pieces)
    if (piece.slot_offset > limit || piece.nbytes > limit - piece.slot_offset)
      throw Error(Errc::invalid_argument, "a copy of " + std::to_string(piece.nbytes) +
                                              " bytes at " + std::to_string(piece.slot_offset) +
                                              " leaves its slot of " + std::to_string(limit));
}

void CopyPump::enqueue(Request request) {
  {
    MutexLock lock(mutex_);
    queue_.push_back(std::move(request));
  }
  work_.notify_one();
}

void CopyPump::submit(SlotLease lease, std::span<const CopyPiece> pieces) {
  check_pieces(pieces);
  if (broken_.load()) throw_why_broken();
  Request request;
  request.slot = lease.slot();
  request.pieces.assign(pieces.begin(), pieces.end());
  enqueue(std::move(request));
  lease.forget();
}

bool CopyPump::withdraw(const Ticket& ticket) {
  return std::erase_if(queue_, [&](const Request& r) { return r.ticket == &ticket; }) > 0;
}

void CopyPump::fetch(unsigned slot, std::span<const CopyPiece> pieces,
                     const std::stop_token& stop) {
  check_pieces(pieces);
  if (broken_.load()) throw_why_broken();
  Ticket ticket;
  Request request;
  request.slot = slot;
  request.direction = Direction::to_host;
  request.pieces.assign(pieces.begin(), pieces.end());
  request.ticket = &ticket;
  enqueue(std::move(request));
  bool dropped = false;
  {
    MutexLock lock(mutex_);
    const auto done = [&]() REQUIRES_LOCK(mutex_) { return ticket.done; };
    if (!ended_.wait(mutex_, stop, done)) {
      if (withdraw(ticket)) throw Error(Errc::cancelled, "cancelled");
      ended_.wait(mutex_, {},
                  done);  // under way: a few milliseconds, and the slot is not ours before
    }
    dropped = ticket.dropped;
  }
  if (dropped) throw_why_broken();
}

void CopyPump::order_after_caller() {
  const ContextGuard current(driver_, context_);
  int capturing = kCaptureStatusNone;
  check(driver_, driver_.cuStreamIsCapturing(caller_, &capturing),
        "looking at the caller's CUDA stream");
  if (capturing != kCaptureStatusNone)
    throw Error(Errc::invalid_argument,
                device_.label() +
                    ": the current stream is capturing a graph: copies cannot be ordered after it");
  Request request;
  request.fence.emplace(driver_);
  check(driver_, driver_.cuEventRecord(request.fence->get(), caller_),
        "recording an event on the caller's CUDA stream");
  {
    MutexLock lock(mutex_);
    copies_began_ = false;
  }
  enqueue(std::move(request));
}

void CopyPump::drain() {
  {
    MutexLock lock(mutex_);
    ended_.wait(mutex_, {}, [&]() REQUIRES_LOCK(mutex_) { return quiet(); });
  }
  if (broken_.load()) throw_why_broken();
  const ContextGuard current(driver_, context_);
  const ScopedEvent last(driver_);
  stream_->record(last.get());
  check(driver_, driver_.cuStreamWaitEvent(caller_, last.get(), 0),
        "ordering the caller's CUDA stream after the copies");
}

// Copies that began had waited for the caller's earlier work, and what follows them on the stream
// comes after it too. Without any, that work may still use the memory, which holds nothing of ours.
void CopyPump::wipe(std::span<const DeviceRange> destinations) noexcept {
  {
    MutexLock lock(mutex_);
    if (cancelled_ || !copies_began_) return;  // cancelled: the driver may be on its way out
  }
  try {
    const ContextGuard current(driver_, context_);
    try {
      stream_->zero(destinations);
    } catch (const Error&) {
      stream_->settle();  // what was enqueued before the failure touches the caller's memory too
    }
  } catch (const Error&) {  // the failure that led here is the one to report
  }
}

void CopyPump::wait_until_quiet(std::chrono::milliseconds patience) noexcept {
  const auto deadline = std::chrono::steady_clock::now() + patience;
  MutexLock lock(mutex_);
  ended_.wait_until(mutex_, {}, deadline, [&]() REQUIRES_LOCK(mutex_) { return quiet(); });
}

void CopyPump::submit_until_closed() noexcept {
  std::optional<ContextGuard> current;
  try {
    current.emplace(driver_, context_);
  } catch (const Error&) {
    fail();
  }
  for (;;) {
    std::optional<Request> request;
    {
      MutexLock lock(mutex_);
      work_.wait(mutex_, {}, [&]() REQUIRES_LOCK(mutex_) { return closing_ || !queue_.empty(); });
      if (queue_.empty()) break;
      request.emplace(std::move(queue_.front()));
      queue_.pop_front();
      issuing_ = true;
    }
    handle(*request);
    request.reset();
    {
      MutexLock lock(mutex_);
      issuing_ = false;
    }
    ended_.notify_all();
  }
  {
    MutexLock lock(mutex_);
    submitter_ended_ = true;
  }
  landed_.notify_all();
}

void CopyPump::handle(Request& request) noexcept {
  const bool is_fence = request.fence.has_value();
  if (broken_.load()) {
    if (!is_fence) end_copies(request.slot, request.ticket, false, true);
    return;
  }
  try {
    if (is_fence) {
      wait_for_fence(*request.fence);
    } else {
      issue(request);
    }
  } catch (...) {
    fail();
    if (!is_fence) end_copies(request.slot, request.ticket, false, stream_->settle());
  }
}

void CopyPump::issue(const Request& request) {
  {
    MutexLock lock(mutex_);
    copies_began_ = true;
  }
  stream_->issue(*ring_, request.slot, request.pieces, request.direction);
  {
    MutexLock lock(mutex_);
    in_flight_.push_back({request.slot, request.ticket});
  }
  landed_.notify_one();
}

// This thread waits, and only then the stream is told to, which costs it nothing any more: what is
// enqueued never sits behind work of the caller that may take minutes, so an error or a stop need
// not wait for that work.
void CopyPump::wait_for_fence(const ScopedEvent& fence) {
  for (auto pause = kFirstPoll;; pause = std::min(2 * pause, kLongestPoll)) {
    const Result result = driver_.cuEventQuery(fence.get());
    if (result == kSuccess) break;
    if (result != kNotReady)
      throw_cuda_error(driver_, result, "waiting for earlier work on the caller's stream");
    const auto deadline = std::chrono::steady_clock::now() + pause;
    MutexLock lock(mutex_);
    if (work_.wait_until(mutex_, {}, deadline, [&] { return broken_.load(); })) return;
  }
  stream_->wait_for(fence.get());
}

void CopyPump::complete_until_closed() noexcept {
  std::optional<ContextGuard> current;
  try {
    current.emplace(driver_, context_);
  } catch (const Error&) {
    fail();
  }
  for (;;) {
    InFlight oldest{};
    {
      MutexLock lock(mutex_);
      landed_.wait(mutex_, {},
                   [&]() REQUIRES_LOCK(mutex_) { return submitter_ended_ || !in_flight_.empty(); });
      if (in_flight_.empty()) return;
      oldest = in_flight_.front();
    }
    const bool copied = wait_for_copies(oldest.slot);
    end_copies(oldest.slot, oldest.ticket, copied, copied || stream_->settle());
    {
      MutexLock lock(mutex_);
      in_flight_.pop_front();
    }
    ended_.notify_all();
  }
}

bool CopyPump::wait_for_copies(unsigned slot) noexcept {
  try {
    check(driver_, driver_.cuEventSynchronize(ring_->event(slot)), "waiting for copies");
    return true;
  } catch (...) {
    fail();
    return false;
  }
}

void CopyPump::end_copies(unsigned slot, Ticket* ticket, bool copied, bool settled) noexcept {
  if (!settled) device_.condemn_ring(*ring_);
  if (ticket) {
    {
      MutexLock lock(mutex_);
      ticket->dropped = !copied;
      ticket->done = true;
    }
    ended_.notify_all();
  } else if (settled) {
    ring_->slots().give_back(slot);
  }
}

}  // namespace tensorizer::device::cuda
