#include "device/cuda/cuda_lane.h"

#include <string.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <string>
#include <thread>
#include <utility>

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
    for (const Use& use : in_use_) {
      forget_chunks(use);
      give_back(use.buffer);
    }
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

void CudaLane::forget_chunks(const Use& use) noexcept {
  if (use.described) (*kernels_)->wipe(use.buffer);
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
  Use oldest;
  std::optional<Kernels::Refused> refused;
  naming(shared_.device, [&] {
    if (in_use_.empty()) return wait_for_line(stop);
    if (in_use_.front().copies)
      wait_for_event(shared_.device.driver(), buffers_.event(in_use_.front().buffer), stop,
                     shared_.cancelled, "waiting for copies");
    oldest = std::move(in_use_.front());
    in_use_.pop_front();
    if (oldest.chunks > 0) refused = (*kernels_)->first_refused(oldest.buffer, oldest.chunks);
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

CudaLane::Use& CudaLane::begin(std::span<const CopyPiece> pieces) {
  check_pieces(pieces);
  if (shared_.cancelled.load()) throw Error(Errc::cancelled, "cancelled");
  in_use_.back().copies = true;
  return in_use_.back();
}

void CudaLane::issue(std::span<const CopyPiece> pieces, Direction direction) {
  const Use& use = begin(pieces);
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

const Kernels* CudaLane::find_kernels() {
  if (shared_.open_on_device == OpenOnDevice::never) return nullptr;
  try {
    return &buffers_.kernels();
  } catch (const Error& error) {
    if (shared_.open_on_device == OpenOnDevice::if_possible) return nullptr;
    throw Error(error.code(), "it cannot decrypt: " + std::string(error.what()));
  }
}

std::span<ChunkToOpen> CudaLane::chunks_to_open() {
  if (!kernels_) kernels_ = naming(shared_.device, [&] { return find_kernels(); });
  if (!*kernels_) return {};
  in_use_.back().described = true;
  return (*kernels_)->chunks(in_use_.back().buffer);
}

void CudaLane::send_sealed(std::span<const CopyPiece> pieces, size_t count,
                           const std::function<void(size_t)>& refuse, const std::stop_token& stop) {
  if (count == 0) return send(pieces, stop);
  naming(shared_.device, [&] {
    pass_fence(stop);
    shared_.copies_began.store(true);
    Use& use = begin(pieces);
    use.chunks = count;
    use.refuse = refuse;
    stream_->issue(buffers_.bytes(use.buffer).data(), buffers_.event(use.buffer), pieces,
                   [&](Stream stream) { (*kernels_)->enqueue_open(stream, use.buffer, count); });
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
