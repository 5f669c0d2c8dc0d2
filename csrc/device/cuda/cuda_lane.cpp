#include "device/cuda/cuda_lane.h"

#include <string.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <thread>

#include "core/error.h"

namespace tensorizer::device::cuda {
namespace {

constexpr size_t kBuffersOfLane = 3;  // one is filled, one is copied, one is on its way
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

CudaLane::CudaLane(LaneState& shared, bool secret)
    : shared_(shared),
      secret_(secret),
      buffers_(*shared.buffers),
      current_(shared.device.driver(), shared.context),
      stream_(buffers_.take_stream()) {
  MutexLock lock(shared_.mutex);
  ++shared_.lanes;
}

// Copies are never left behind. Where the driver can no longer tell whether they ended, the memory
// is given up for good.
CudaLane::~CudaLane() {
  const bool copies =
      std::any_of(in_use_.begin(), in_use_.end(), [](const Use& use) { return use.copies; });
  const Result end = copies ? stream_->settle() : kSuccess;
  if (end == kSuccess) {
    for (const Use& use : in_use_) give_back(use.buffer);
    for (const unsigned buffer : spare_) give_back(buffer);
    buffers_.give_back(std::move(stream_));
  } else {
    shared_.device.condemn(buffers_, end);
    keep_for_good(std::move(stream_));
  }
  {
    MutexLock lock(shared_.mutex);
    --shared_.lanes;
  }
  shared_.changed.notify_all();
}

void CudaLane::give_back(unsigned buffer) noexcept {
  if (secret_) {
    const std::span<std::byte> bytes = buffers_.bytes(buffer);
    ::explicit_bzero(bytes.data(), bytes.size());
  }
  buffers_.give_back(buffer);
}

std::span<std::byte> CudaLane::try_acquire() {
  unsigned buffer = 0;
  if (!spare_.empty()) {
    buffer = spare_.back();
    spare_.pop_back();
  } else if (in_use_.size() < kBuffersOfLane) {
    const auto taken = buffers_.try_take();
    if (!taken) return {};
    buffer = *taken;
  } else {
    return {};
  }
  in_use_.push_back({buffer});
  return buffers_.bytes(buffer);
}

void CudaLane::wait(const std::stop_token& stop) {
  naming(shared_.device, [&] {
    if (in_use_.empty()) return wait_for_line(stop);
    const Use oldest = in_use_.front();
    if (oldest.copies)
      wait_for_event(shared_.device.driver(), buffers_.event(oldest.buffer), stop,
                     shared_.cancelled, "waiting for copies");
    in_use_.pop_front();
    if (buffers_.has_waiters()) {
      give_back(oldest.buffer);
    } else {
      spare_.push_back(oldest.buffer);
    }
  });
}

void CudaLane::wait_for_line(const std::stop_token& stop) {
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

void CudaLane::check_pieces(std::span<const CopyPiece> pieces) const {
  const uint64_t limit = buffers_.nbytes();
  for (const CopyPiece& piece : pieces) {
    if (piece.buffer_offset > limit || piece.nbytes > limit - piece.buffer_offset)
      throw Error(Errc::invalid_argument, "a copy of " + std::to_string(piece.nbytes) +
                                              " bytes at " + std::to_string(piece.buffer_offset) +
                                              " leaves its buffer of " + std::to_string(limit));
  }
}

void CudaLane::issue(std::span<const CopyPiece> pieces, Direction direction) {
  check_pieces(pieces);
  if (shared_.cancelled.load()) throw Error(Errc::cancelled, "cancelled");
  Use& use = in_use_.back();
  use.copies = true;
  stream_->issue(buffers_.bytes(use.buffer).data(), buffers_.event(use.buffer), pieces, direction);
}

// The host waits for the caller's work, so that what is enqueued runs at once: an error or a stop
// need not wait for work that may take minutes.
void CudaLane::pass_fence(const std::stop_token& stop) {
  if (fence_passed_) return;
  wait_for_event(shared_.device.driver(), shared_.fence, stop, shared_.cancelled,
                 "waiting for earlier work on the caller's stream");
  fence_passed_ = true;
}

void CudaLane::send(std::span<const CopyPiece> pieces, const std::stop_token& stop) {
  naming(shared_.device, [&] {
    pass_fence(stop);
    shared_.copies_began.store(true);
    issue(pieces, Direction::to_device);
  });
}

void CudaLane::fetch(std::span<const CopyPiece> pieces, const std::stop_token& stop) {
  naming(shared_.device, [&] {
    pass_fence(stop);
    issue(pieces, Direction::to_host);
    wait_for_event(shared_.device.driver(), buffers_.event(in_use_.back().buffer), stop,
                   shared_.cancelled, "waiting for copies");
    in_use_.back().copies = false;
  });
}

void CudaLane::finish(const std::stop_token& stop) {
  while (!in_use_.empty()) wait(stop);
}

}  // namespace tensorizer::device::cuda
