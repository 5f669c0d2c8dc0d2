#include "device/cuda/cuda_copy.h"

#include <unistd.h>

#include <set>

#include "device/cuda/copy_pump.h"
#include "device/cuda/kernels/embedded.h"

namespace tensorizer::device::cuda {
namespace {

constexpr std::chrono::seconds kShutDownPatience{2};

// What shut_down() has to stop. Process lifetime, never destroyed.
struct LivePumps {
  Mutex mutex;
  std::set<CopyPump*> pumps GUARDED_BY(mutex);
};

LivePumps& live_pumps() {
  static LivePumps* const instance = new LivePumps;
  return *instance;
}

}  // namespace

CudaCopyEngine::CudaCopyEngine(const CudaCopyOptions& options)
    : owner_(::getpid()), pump_(std::make_unique<CopyPump>(options)) {
  LivePumps& live = live_pumps();
  MutexLock lock(live.mutex);
  live.pumps.insert(pump_.get());
}

CudaCopyEngine::~CudaCopyEngine() {
  if (::getpid() != owner_) {
    static_cast<void>(pump_.release());  // its threads are the parent's; joining them would hang
    return;
  }
  pump_->cancel();
  LivePumps& live = live_pumps();
  MutexLock lock(live.mutex);
  live.pumps.erase(pump_.get());
}

CopyPump& CudaCopyEngine::pump() const {
  if (::getpid() != owner_)
    throw Error(Errc::device, "a CUDA copy engine does not work in a forked child");
  return *pump_;
}

uint64_t CudaCopyEngine::slot_nbytes() const noexcept {
  return pump_->ring().settings().slot_nbytes;
}

SlotLease CudaCopyEngine::acquire(const std::stop_token& stop) {
  CopyPump& pump = this->pump();
  const unsigned slot = pump.take_slot(stop);
  return {this, slot, pump.ring().slots().bytes(slot)};
}

void CudaCopyEngine::submit(SlotLease lease, std::span<const CopyPiece> pieces) {
  pump().submit(std::move(lease), pieces);
}

void CudaCopyEngine::fetch(const SlotLease& lease, std::span<const CopyPiece> pieces,
                           const std::stop_token& stop) {
  pump().fetch(lease.slot(), pieces, stop);
}

void CudaCopyEngine::drain() { pump().drain(); }

void CudaCopyEngine::abandon() noexcept {
  if (::getpid() == owner_) pump_->abandon();
}

void CudaCopyEngine::wipe(std::span<const DeviceRange> destinations) noexcept {
  if (::getpid() == owner_) pump_->wipe(destinations);
}

void CudaCopyEngine::order_after_caller() { pump().order_after_caller(); }

void CudaCopyEngine::cancel() noexcept {
  if (::getpid() == owner_) pump_->cancel();
}

void CudaCopyEngine::give_back(unsigned slot) noexcept {
  if (::getpid() == owner_) pump_->ring().slots().give_back(slot);
}

bool release_ring(Ordinal device) {
  return !driver_is_in_use() || Device::get(device).release_ring();
}

bool release_all_rings() { return !driver_is_in_use() || Device::release_all(); }

RingStatus ring_status(Ordinal device) {
  return driver_is_in_use() ? Device::get(device).status() : RingStatus{};
}

bool has_kernels() noexcept { return !embedded_kernels().empty(); }

void shut_down() noexcept {
  if (!driver_is_in_use()) return;
  LivePumps& live = live_pumps();
  {
    MutexLock lock(live.mutex);
    for (CopyPump* pump : live.pumps) pump->cancel();
    for (CopyPump* pump : live.pumps) pump->wait_until_quiet(kShutDownPatience);
  }
  Device::stop_idle_threads();
}

}  // namespace tensorizer::device::cuda
