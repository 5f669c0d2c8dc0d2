#include "device/cuda/cuda_copier.h"

#include <algorithm>
#include <chrono>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "core/error.h"
#include "core/wipe.h"

namespace tensorizer::device::cuda {
namespace {

// One is filled, one is copied, one is on its way. With more, the copies of another load would wait
// behind them.
constexpr size_t kBuffersOfCopier = 3;
constexpr std::chrono::microseconds kFirstPause{10};
constexpr std::chrono::microseconds kLongestPause{200};

}  // namespace

void wait_for_event(const Driver& driver, Event event, const std::stop_token& stop,
                    const std::atomic<bool>& cancelled, const char* action) {
  for (auto pause = kFirstPause;; pause = std::min(2 * pause, kLongestPause)) {
    const Result result = driver.cuEventQuery(event);
    if (result == kSuccess) return;
    if (result != kNotReady) throw_cuda_error(driver, result, action);
    if (stop.stop_requested() || cancelled.load()) throw Error(Errc::cancelled, "cancelled");
    std::this_thread::sleep_for(pause);
  }
}

// Calls `fn` with the device's context current; an error gets the device's name.
template <class Fn>
auto CudaCopier::in_context(Fn&& fn) const {
  return naming(shared_.device, [&] {
    const ContextGuard current(shared_.device.driver(), shared_.context);
    return fn();
  });
}

CudaCopier::CudaCopier(CopierState& shared, bool secret)
    : shared_(shared), secret_(secret), buffers_(*shared.buffers) {
  if (secret && shared_.open_on_device != OpenOnDevice::never) buffers_.start_kernels();
  MutexLock lock(shared_.mutex);
  ++shared_.copiers;
}

// Copies are never left behind. Where the driver can no longer tell whether they ended, the memory
// is given up for good.
CudaCopier::~CudaCopier() {
  const Result end = settle();
  if (end == kSuccess) {
    for (const Use& use : in_use_) {
      forget_chunks(use);
      give_back(use.buffer);
    }
    for (const unsigned buffer : spare_) give_back(buffer);
  } else {
    shared_.device.condemn(buffers_, end);
  }
  {
    MutexLock lock(shared_.mutex);
    --shared_.copiers;
  }
  shared_.changed.notify_all();
}

// Only where a load ends early: the streams, not the events, since a failure may have come between
// a copy and its event.
Result CudaCopier::settle() noexcept {
  Result end = kSuccess;
  for (const Use& use : in_use_) {
    if (!use.copies) continue;
    try {
      const ContextGuard current(shared_.device.driver(), shared_.context);
      buffers_.on_stream(use.buffer, [&](CopyStream& stream) {
        if (const Result result = stream.settle(); result != kSuccess) end = result;
      });
    } catch (const Error&) {
      end = kInvalidValue;
    }
  }
  return end;
}

void CudaCopier::forget_chunks(const Use& use) const noexcept {
  if (use.described) kernels_->wipe(use.buffer);
}

void CudaCopier::give_back(unsigned buffer) noexcept {
  if (secret_) {
    const std::span<std::byte> bytes = buffers_.bytes(buffer);
    wipe(bytes.data(), bytes.size());
  }
  buffers_.give_back(buffer);
}

std::span<std::byte> CudaCopier::try_acquire() {
  unsigned buffer = 0;
  if (!spare_.empty()) {
    buffer = spare_.back();
    spare_.pop_back();
  } else if (in_use_.size() < kBuffersOfCopier) {
    const auto taken = in_context([&] { return buffers_.try_take(); });
    if (!taken) return {};
    buffer = *taken;
  } else {
    return {};
  }
  in_use_.push_back({.buffer = buffer, .refuse = {}});
  return buffers_.bytes(buffer);
}

void CudaCopier::wait(const std::stop_token& stop) {
  Use oldest;
  std::optional<Kernels::Refused> refused;
  if (in_use_.empty()) return naming(shared_.device, [&] { wait_for_line(stop); });
  in_context([&] {
    if (in_use_.front().copies)
      wait_for_event(shared_.device.driver(), buffers_.event(in_use_.front().buffer), stop,
                     shared_.cancelled, "waiting for copies");
    oldest = std::move(in_use_.front());
    in_use_.pop_front();
    if (oldest.chunks > 0) refused = kernels_->first_refused(oldest.buffer, oldest.chunks);
    forget_chunks(oldest);
    if (buffers_.has_waiters()) {
      give_back(oldest.buffer);
    } else {
      spare_.push_back(oldest.buffer);
    }
    if (refused && !refused->ran) throw Error(Errc::device, "its kernels did not run");
  });
  if (refused) oldest.refuse(refused->chunk);
}

void CudaCopier::wait_for_line(const std::stop_token& stop) {
  if (const auto taken = buffers_.take(stop, shared_.cancelled)) {
    spare_.push_back(*taken);
    return;
  }
  const Result why = buffers_.closed_by();
  if (why != kSuccess && !stop.stop_requested() && !shared_.cancelled.load())
    throw_cuda_error(shared_.device.driver(), why,
                     "its staging memory was given up after another copy failed");
  throw Error(Errc::cancelled, "cancelled");
}

void CudaCopier::give_back_unused() noexcept {
  if (!in_use_.empty() && !in_use_.back().copies) {
    forget_chunks(in_use_.back());
    give_back(in_use_.back().buffer);
    in_use_.pop_back();
  }
  for (const unsigned buffer : spare_) give_back(buffer);
  spare_.clear();
}

void CudaCopier::check_pieces(std::span<const CopyPiece> pieces) const {
  const uint64_t limit = buffers_.nbytes();
  for (const CopyPiece& piece : pieces) {
    if (piece.buffer_offset > limit || piece.nbytes > limit - piece.buffer_offset)
      throw Error(Errc::invalid_argument, "a copy of " + std::to_string(piece.nbytes) +
                                              " bytes at " + std::to_string(piece.buffer_offset) +
                                              " leaves its buffer of " + std::to_string(limit));
  }
}

// The host waits for the caller's work, so that what is enqueued runs at once: an error or a stop
// need not wait for work that may take minutes.
void CudaCopier::pass_fence(const std::stop_token& stop) {
  // Read before the event is asked: a record that comes meanwhile covers this one.
  const uint64_t fences = shared_.fences.load();
  if (fences_passed_ == fences) return;
  in_context([&] {
    wait_for_event(shared_.device.driver(), shared_.fence, stop, shared_.cancelled,
                   "waiting for earlier work on the caller's stream");
  });
  fences_passed_ = fences;
}

void CudaCopier::enqueue(std::span<const CopyPiece> pieces, Direction direction,
                         const std::function<void(Stream, const CopyWithTables&)>& around,
                         const std::stop_token& stop) {
  pass_fence(stop);
  in_context([&] {
    check_pieces(pieces);
    if (shared_.cancelled.load()) throw Error(Errc::cancelled, "cancelled");
    Use& use = in_use_.back();
    use.copies = true;
    buffers_.on_stream(use.buffer, [&](CopyStream& stream) {
      stream.issue(buffers_.bytes(use.buffer).data(), buffers_.event(use.buffer), pieces, direction,
                   around);
    });
  });
}

void CudaCopier::send(std::span<const CopyPiece> pieces, const std::stop_token& stop) {
  enqueue(pieces, Direction::to_device, {}, stop);
}

// Where the host may do it as well, it does until the kernels are there.
const Kernels* CudaCopier::find_kernels(const std::stop_token& stop) {
  if (shared_.open_on_device == OpenOnDevice::never) return nullptr;
  try {
    if (shared_.open_on_device == OpenOnDevice::if_possible) return buffers_.kernels_now();
    return buffers_.kernels(stop);
  } catch (const Error& error) {
    if (error.code() == Errc::cancelled) throw;
    if (shared_.open_on_device == OpenOnDevice::if_possible) return nullptr;
    throw Error(error.code(), "it cannot decrypt: " + std::string(error.what()));
  }
}

size_t CudaCopier::most_chunks_to_open(const std::stop_token& stop) {
  if (!kernels_) kernels_ = naming(shared_.device, [&] { return find_kernels(stop); });
  return kernels_ ? kernels_->room() : 0;
}

std::span<ChunkToOpen> CudaCopier::chunks_to_open(const std::stop_token& stop) {
  if (most_chunks_to_open(stop) == 0) return {};
  Use& use = in_use_.back();
  use.described = true;
  return kernels_->chunks(use.buffer);
}

void CudaCopier::send_to_open(std::span<const CopyPiece> pieces, size_t chunks,
                              const std::function<void(size_t)>& refuse,
                              const std::stop_token& stop) {
  if (chunks == 0) return send(pieces, stop);
  Use& use = in_use_.back();
  use.chunks = chunks;
  use.refuse = refuse;
  const auto enqueue_all = [&](Stream stream, const CopyWithTables& copy) {
    kernels_->enqueue(stream, use.buffer, chunks, copy);
  };
  enqueue(pieces, Direction::to_device, enqueue_all, stop);
}

void CudaCopier::begin_fetch(std::span<const CopyPiece> pieces, const std::stop_token& stop) {
  enqueue(pieces, Direction::to_host, {}, stop);
}

void CudaCopier::end_fetch(const std::stop_token& stop) {
  const auto oldest =
      std::find_if(in_use_.begin(), in_use_.end(), [](const Use& use) { return use.copies; });
  if (oldest == in_use_.end()) return;
  in_context([&] {
    wait_for_event(shared_.device.driver(), buffers_.event(oldest->buffer), stop, shared_.cancelled,
                   "waiting for copies");
  });
  oldest->copies = false;
}

void CudaCopier::finish(const std::stop_token& stop) {
  while (!in_use_.empty()) wait(stop);
}

}  // namespace tensorizer::device::cuda
