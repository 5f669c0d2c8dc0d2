#include "device/cuda/cuda_device.h"

#include <algorithm>
#include <system_error>
#include <utility>

namespace tensorizer::device::cuda {
namespace {

// Process lifetime, like the devices in it.
struct Registry {
  Mutex mutex;
  std::vector<std::unique_ptr<Device>> devices GUARDED_BY(mutex);
};

Registry& registry() {
  static Registry* const instance = new Registry;
  return *instance;
}

}  // namespace

Device& Device::get(Ordinal ordinal) {
  const Driver& driver = cuda::driver();
  Registry& known = registry();
  MutexLock lock(known.mutex);
  for (const auto& device : known.devices)
    if (device->ordinal() == ordinal) return *device;
  int count = 0;
  check(driver, driver.cuDeviceGetCount(&count), "counting CUDA devices");
  if (ordinal < 0 || ordinal >= count)
    throw Error(Errc::device, "CUDA device " + std::to_string(ordinal) + ": expected one of the " +
                                  std::to_string(count) + " devices of the driver");
  known.devices.push_back(std::unique_ptr<Device>(new Device(driver, ordinal)));
  return *known.devices.back();
}

bool Device::shares_host_memory() const {
  Ordinal handle = 0;
  check(driver_, driver_.cuDeviceGet(&handle, ordinal_), "finding the CUDA device");
  const auto has = [&](int attribute) {
    int value = 0;
    return driver_.cuDeviceGetAttribute(&value, attribute, handle) == kSuccess && value != 0;
  };
  return has(kAttributeIntegrated) || has(kAttributeUsesHostPageTables);
}

std::shared_ptr<PinnedBuffers> Device::use_pinned(const PinnedSettings& wanted) {
  validate(wanted);
  MutexLock lock(mutex_);
  if (pinned_ && users_ == 0 && !(pinned_->wanted() == wanted)) free_pinned();
  if (!pinned_) make_pinned(wanted);
  ++users_;
  ++uses_;
  changed_.notify_all();
  return {pinned_.get(), [this](PinnedBuffers* buffers) { end_use(buffers); }};
}

Context Device::context() const {
  MutexLock lock(mutex_);
  return context_;
}

void Device::make_pinned(const PinnedSettings& settings) {
  Ordinal handle = 0;
  check(driver_, driver_.cuDeviceGet(&handle, ordinal_), "finding the CUDA device");
  Context context = nullptr;
  check(driver_, driver_.cuDevicePrimaryCtxRetain(&context, handle),
        "starting to use the CUDA device");
  try {
    const ContextGuard current(driver_, context);
    pinned_ = std::make_unique<PinnedBuffers>(driver_, handle, context, settings, kernels_tested_);
  } catch (...) {
    static_cast<void>(driver_.cuDevicePrimaryCtxRelease(handle));
    throw;
  }
  context_ = context;
  users_ = 0;
  release_wanted_ = false;
}

void Device::free_pinned() {
  Context context = std::exchange(context_, nullptr);
  try {
    const ContextGuard current(driver_, context);
    pinned_.reset();
  } catch (const Error&) {
    static_cast<void>(
        pinned_.release());  // the driver is beyond reach: memory it may hold stays mapped
    return;
  }
  Ordinal handle = 0;
  if (driver_.cuDeviceGet(&handle, ordinal_) == kSuccess)
    static_cast<void>(driver_.cuDevicePrimaryCtxRelease(handle));
}

void Device::end_use(PinnedBuffers* buffers) noexcept {
  if (!driver_is_in_use()) return;  // a forked child: all this belongs to the parent
  MutexLock lock(mutex_);
  if (buffers != pinned_.get() || --users_ > 0) return;  // condemned ones have no users to count
  if (release_wanted_ || buffers->wanted().keep_idle.count() == 0) {
    free_pinned();
  } else {
    start_idle_wait();
  }
  changed_.notify_all();
}

void Device::start_idle_wait() {
  if (waits_until_idle_ || process_ends_) return;
  try {
    idle_wait_ = ProcessPool::instance().start([this] { wait_until_idle(); });
    waits_until_idle_ = true;
  } catch (const std::system_error&) {
    free_pinned();  // no thread to be had: give the memory back now
  }
}

void Device::wait_until_idle() {
  MutexLock lock(mutex_);
  const auto is_over = [&]() REQUIRES_LOCK(mutex_) { return !pinned_ || process_ends_; };
  while (!is_over()) {
    const uint64_t seen = uses_;
    const auto deadline = std::chrono::steady_clock::now() + pinned_->wanted().keep_idle;
    const bool used_again = changed_.wait_until(
        mutex_, {}, deadline, [&]() REQUIRES_LOCK(mutex_) { return is_over() || uses_ != seen; });
    if (is_over()) break;
    if (!used_again && users_ == 0) {
      free_pinned();
      break;
    }
    changed_.wait(mutex_, {}, [&]() REQUIRES_LOCK(mutex_) { return is_over() || users_ == 0; });
  }
  waits_until_idle_ = false;
}

void Device::stop_idle_wait() noexcept {
  ProcessJob job;
  {
    MutexLock lock(mutex_);
    process_ends_ = true;
    job = idle_wait_;
  }
  changed_.notify_all();
  job.join();
}

void Device::stop_idle_waits() noexcept {
  if (!driver_is_in_use()) return;
  Registry& known = registry();
  MutexLock lock(known.mutex);
  for (const auto& device : known.devices) device->stop_idle_wait();
}

bool Device::release_all() {
  Registry& known = registry();
  MutexLock lock(known.mutex);
  bool all = true;
  for (const auto& device : known.devices) all = device->release_pinned() && all;
  return all;
}

bool Device::release_pinned() {
  MutexLock lock(mutex_);
  if (!pinned_) return true;
  if (users_ > 0) {
    release_wanted_ = true;
    return false;
  }
  free_pinned();
  changed_.notify_all();
  return true;
}

void Device::condemn(const PinnedBuffers& buffers, Result why) {
  MutexLock lock(mutex_);
  if (pinned_.get() != &buffers) return;
  pinned_->close(why);
  condemned_.push_back(std::move(pinned_));
  context_ = nullptr;  // stays retained: the users of the old memory still work in it
  users_ = 0;
  changed_.notify_all();
}

PinnedStatus Device::status() const {
  MutexLock lock(mutex_);
  if (!pinned_) return {};
  const unsigned free = pinned_->free_count();
  return {true, users_, std::max(free, pinned_->count()), free, pinned_->nbytes()};
}

}  // namespace tensorizer::device::cuda
