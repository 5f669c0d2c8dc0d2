#include "device/cuda/cuda_copy.h"

#include <set>

#include "device/cuda/cuda_copier.h"

namespace tensorizer::device::cuda {
namespace {

constexpr std::chrono::seconds kShutDownPatience{2};

// What shut_down() has to stop. Process lifetime, never destroyed.
struct LiveEngines {
  Mutex mutex;
  std::set<CudaCopyEngine*> engines GUARDED_BY(mutex);
};

LiveEngines& live_engines() {
  static LiveEngines* const instance = new LiveEngines;
  return *instance;
}

}  // namespace

CudaCopyEngine::CudaCopyEngine(const CudaCopyOptions& options)
    : caller_(reinterpret_cast<Stream>(options.caller_stream)) {
  Device& device = Device::get(options.device);
  std::shared_ptr<PinnedBuffers> buffers = device.use_pinned(options.pinned);
  state_ = std::make_unique<CopierState>(device, std::move(buffers), device.context(),
                                         options.open_on_device);
  {
    const ContextGuard current(device.driver(), state_->context);
    state_->fence = state_->buffers->take_event();
  }
  try {
    order_after_caller();
    LiveEngines& live = live_engines();
    MutexLock lock(live.mutex);
    live.engines.insert(this);
  } catch (...) {
    state_->buffers->give_back_event(state_->fence);
    throw;
  }
}

std::string CudaCopyEngine::why_not_opened(const std::stop_token& stop) {
  if (state().open_on_device == OpenOnDevice::never) return "it was not asked for";
  try {
    state().buffers->kernels(stop);
    return {};
  } catch (const Error& error) {
    if (error.code() == Errc::cancelled) throw;
    return error.what();
  }
}

CudaCopyEngine::~CudaCopyEngine() {
  if (!owner_.is_this_one()) {
    static_cast<void>(state_.release());  // all of it belongs to the parent
    return;
  }
  {
    LiveEngines& live = live_engines();
    MutexLock lock(live.mutex);
    live.engines.erase(this);
  }
  state_->buffers->give_back_event(state_->fence);
}

CopierState& CudaCopyEngine::state() const {
  if (!owner_.is_this_one())
    throw Error(Errc::device, "a CUDA copy engine does not work in a forked child");
  return *state_;
}

uint64_t CudaCopyEngine::buffer_nbytes() const noexcept { return state_->buffers->nbytes(); }

std::string CudaCopyEngine::found_wrong() const {
  Device& device = state().device;
  const std::string wrong = device.kernels_tested().wrong().value_or("");
  return wrong.empty() ? wrong : device.label() + ": " + wrong;
}

std::string CudaCopyEngine::shortage() const { return state().buffers->shortage(); }

void CudaCopyEngine::order_after_caller() {
  CopierState& state = this->state();
  const Driver& driver = state.device.driver();
  naming(state.device, [&] {
    const ContextGuard current(driver, state.context);
    int capturing = kCaptureStatusNone;
    check(driver, driver.cuStreamIsCapturing(caller_, &capturing),
          "looking at the caller's CUDA stream");
    if (capturing != kCaptureStatusNone)
      throw Error(Errc::invalid_argument,
                  "the current stream is capturing a graph: copies cannot be ordered after it");
    check(driver, driver.cuEventRecord(state.fence, caller_),
          "recording an event on the caller's CUDA stream");
    state.fences.fetch_add(1);
  });
}

bool CudaCopyEngine::is_ready() const noexcept {
  try {
    const CopierState& state = this->state();
    const ContextGuard current(state.device.driver(), state.context);
    return state.device.driver().cuEventQuery(state.fence) == kSuccess;
  } catch (const Error&) {
    return false;
  }
}

std::unique_ptr<Copier> CudaCopyEngine::make_copier(bool secret) {
  CopierState& state = this->state();
  return naming(state.device, [&] { return std::make_unique<CudaCopier>(state, secret); });
}

void CudaCopyEngine::wipe(std::span<const DeviceRange> destinations) noexcept {
  if (!owner_.is_this_one() || state_->cancelled.load()) return;
  try {
    const ContextGuard current(state_->device.driver(), state_->context);
    Result end = kSuccess;
    state_->buffers->on_stream(0, [&](CopyStream& stream) {
      try {
        stream.zero(destinations);
      } catch (const Error&) {
        end = stream.settle();  // what was enqueued before touches the caller's memory too
      }
    });
    // Not below the lock of the stream, which the thread that makes the buffers takes below the
    // device's.
    if (end != kSuccess) state_->device.condemn(*state_->buffers, end);
  } catch (...) {  // the failure that led here is the one to report
  }
}

void CudaCopyEngine::cancel() noexcept {
  if (!owner_.is_this_one()) return;
  state_->cancelled.store(true);
  state_->buffers->wake_all();
}

void CudaCopyEngine::wait_for_copiers(std::chrono::milliseconds patience) noexcept {
  const auto deadline = std::chrono::steady_clock::now() + patience;
  CopierState& state = *state_;
  MutexLock lock(state.mutex);
  state.changed.wait_until(state.mutex, {}, deadline,
                           [&]() REQUIRES_LOCK(state.mutex) { return state.copiers == 0; });
}

bool release_pinned(Ordinal device) {
  return !driver_is_in_use() || Device::get(device).release_pinned();
}

bool release_all_pinned() { return !driver_is_in_use() || Device::release_all(); }

PinnedStatus pinned_status(Ordinal device) {
  return driver_is_in_use() ? Device::get(device).status() : PinnedStatus{};
}

void shut_down() noexcept {
  if (!driver_is_in_use()) return;
  LiveEngines& live = live_engines();
  {
    MutexLock lock(live.mutex);
    for (CudaCopyEngine* engine : live.engines) engine->cancel();
    for (CudaCopyEngine* engine : live.engines) engine->wait_for_copiers(kShutDownPatience);
  }
  Device::stop_idle_waits();
}

}  // namespace tensorizer::device::cuda
