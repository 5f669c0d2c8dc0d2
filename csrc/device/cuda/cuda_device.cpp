#include "device/cuda/cuda_device.h"

#include <algorithm>
#include <cctype>
#include <fstream>
#include <system_error>

#include "core/checked_math.h"
#include "device/cuda/kernels/embedded.h"

namespace tensorizer::device::cuda {
namespace {

constexpr uint64_t kPage = 4096;
constexpr unsigned kMaxSlots = 4096;
constexpr uint64_t kMaxRingNbytes = 64ULL << 30;
constexpr unsigned kFaultThreads = 4;  // zeroing pages is bound by memory bandwidth soon after

// The NUMA node the device hangs on, -1 where the system does not say.
int numa_node_of(const Driver& driver, Ordinal device) {
  char bus_id[64] = {};
  if (driver.cuDeviceGetPCIBusId(bus_id, sizeof bus_id, device) != kSuccess) return -1;
  std::string name(bus_id);
  std::transform(name.begin(), name.end(), name.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  std::ifstream file("/sys/bus/pci/devices/" + name + "/numa_node");
  int node = -1;
  return file >> node ? node : -1;
}

bool registers_host_memory(const Driver& driver, Ordinal device) {
  int supported = 0;
  return driver.cuDeviceGetAttribute(&supported, kAttributeHostRegisterSupported, device) ==
             kSuccess &&
         supported != 0;
}

// Process lifetime, like the devices in it.
struct Registry {
  Mutex mutex;
  std::vector<std::unique_ptr<Device>> devices GUARDED_BY(mutex);
};

// Rings that the device may still write to: kept for good.
struct CondemnedRings {
  Mutex mutex;
  std::vector<std::unique_ptr<PinnedRing>> rings GUARDED_BY(mutex);
};

void keep_for_good(std::unique_ptr<PinnedRing> ring) {
  static CondemnedRings* const condemned = new CondemnedRings;
  MutexLock lock(condemned->mutex);
  condemned->rings.push_back(std::move(ring));
}

Registry& registry() {
  static Registry* const instance = new Registry;
  return *instance;
}

RingSettings whole_pages(RingSettings settings) {
  settings.slot_nbytes = align_up(settings.slot_nbytes, kPage);
  return settings;
}

}  // namespace

void validate(const RingSettings& settings) {
  if (settings.slots < 2 || settings.slots > kMaxSlots)
    throw Error(Errc::invalid_argument, "pinned slots: wanted 2 to " + std::to_string(kMaxSlots) +
                                            ", found " + std::to_string(settings.slots));
  if (settings.slot_nbytes < kPage || settings.slot_nbytes > kMaxRingNbytes / settings.slots)
    throw Error(Errc::invalid_argument,
                "bytes of a pinned slot: wanted 4096 or more, and 64 GiB or less in all slots, "
                "found " +
                    std::to_string(settings.slot_nbytes));
}

ContextGuard::ContextGuard(const Driver& driver, Context context)
    : driver_(driver), capture_mode_(kCaptureModeRelaxed) {
  check(driver_, driver_.cuCtxPushCurrent(context), "making the CUDA context current");
  if (driver_.cuThreadExchangeStreamCaptureMode(&capture_mode_) != kSuccess)
    capture_mode_ = kCaptureModeRelaxed;
}

ContextGuard::~ContextGuard() {
  static_cast<void>(driver_.cuThreadExchangeStreamCaptureMode(&capture_mode_));
  Context popped = nullptr;
  static_cast<void>(driver_.cuCtxPopCurrent(&popped));
}

PinnedRing::PinnedRing(const Driver& driver, Ordinal device, const RingSettings& settings)
    : driver_(driver), device_(device), settings_(settings) {
  const uint64_t slots_nbytes = settings.slots * settings.slot_nbytes;
  pin(slots_nbytes + settings.slots * kTableNbytes);
  std::byte* data = allocated_ ? allocated_ : mapping_.data();
  tables_ = data + slots_nbytes;
  try {
    for (unsigned slot = 0; slot < settings.slots; ++slot) {
      Event event = nullptr;
      check(driver_, driver_.cuEventCreate(&event, kEventBlockingSync | kEventDisableTiming),
            "creating a CUDA event");
      events_.push_back(event);
    }
    slots_ = std::make_unique<SlotRing>(data, settings.slots, settings.slot_nbytes);
  } catch (...) {
    unpin();
    throw;
  }
}

PinnedRing::~PinnedRing() { unpin(); }

void PinnedRing::pin(uint64_t nbytes) {
  const std::string action = "pinning " + std::to_string(nbytes) +
                             " bytes of host memory for staging (a smaller ring needs less)";
  if (registers_host_memory(driver_, device_)) {
    mapping_ = HostMapping(nbytes, numa_node_of(driver_, device_), kFaultThreads);
    const Result result = driver_.cuMemHostRegister(mapping_.data(), mapping_.nbytes(),
                                                    kHostRegisterPortable | kHostRegisterDeviceMap);
    if (result == kSuccess) return;
    mapping_ = HostMapping();
    if (result != kNotSupported && result != kNotPermitted)
      throw_cuda_error(driver_, result, action);
  }
  void* address = nullptr;  // systems that cannot register memory still allocate it
  const Result result =
      driver_.cuMemHostAlloc(&address, nbytes, kHostAllocPortable | kHostAllocDeviceMap);
  if (result != kSuccess) throw_cuda_error(driver_, result, action);
  allocated_ = static_cast<std::byte*>(address);
}

void PinnedRing::unpin() noexcept {
  for (Event event : events_) static_cast<void>(driver_.cuEventDestroy(event));
  events_.clear();
  if (mapping_.data()) static_cast<void>(driver_.cuMemHostUnregister(mapping_.data()));
  if (allocated_) static_cast<void>(driver_.cuMemFreeHost(std::exchange(allocated_, nullptr)));
}

Device& Device::get(Ordinal ordinal) {
  const Driver& driver = cuda::driver();
  Registry& known = registry();
  MutexLock lock(known.mutex);
  for (const auto& device : known.devices)
    if (device->ordinal() == ordinal) return *device;
  int count = 0;
  check(driver, driver.cuDeviceGetCount(&count), "counting CUDA devices");
  if (ordinal < 0 || ordinal >= count)
    throw Error(Errc::device, "CUDA device " + std::to_string(ordinal) +
                                  ": no such device, found " + std::to_string(count));
  known.devices.push_back(std::unique_ptr<Device>(new Device(driver, ordinal)));
  return *known.devices.back();
}

std::shared_ptr<PinnedRing> Device::use_ring(const RingSettings& wanted) {
  validate(wanted);
  const RingSettings settings = whole_pages(wanted);
  MutexLock lock(mutex_);
  if (ring_ && users_ == 0 && !(ring_->settings() == settings)) free_ring();
  if (!ring_) make_ring(settings);
  ++users_;
  ++uses_;
  changed_.notify_all();
  return {ring_.get(), [this](PinnedRing* ring) { end_use(ring); }};
}

Context Device::context() const {
  MutexLock lock(mutex_);
  return context_;
}

void Device::make_ring(const RingSettings& settings) {
  Ordinal handle = 0;
  check(driver_, driver_.cuDeviceGet(&handle, ordinal_), "finding the CUDA device");
  Context context = nullptr;
  check(driver_, driver_.cuDevicePrimaryCtxRetain(&context, handle),
        "starting to use the CUDA device");
  try {
    const ContextGuard current(driver_, context);
    ring_ = std::make_unique<PinnedRing>(driver_, handle, settings);
  } catch (...) {
    static_cast<void>(driver_.cuDevicePrimaryCtxRelease(handle));
    throw;
  }
  context_ = context;
  users_ = 0;
  release_wanted_ = false;
}

void Device::free_ring() {
  Context context = std::exchange(context_, nullptr);
  Module kernels = std::exchange(kernels_, nullptr);
  try {
    const ContextGuard current(driver_, context);
    if (kernels) static_cast<void>(driver_.cuModuleUnload(kernels));
    ring_.reset();
  } catch (const Error&) {
    static_cast<void>(
        ring_.release());  // the driver is beyond reach: memory it may hold stays mapped
    return;
  }
  Ordinal handle = 0;
  if (driver_.cuDeviceGet(&handle, ordinal_) == kSuccess)
    static_cast<void>(driver_.cuDevicePrimaryCtxRelease(handle));
}

void Device::end_use(PinnedRing* ring) noexcept {
  if (!driver_is_in_use()) return;  // a forked child: all this belongs to the parent
  MutexLock lock(mutex_);
  if (ring != ring_.get() || --users_ > 0) return;  // a condemned ring has no users to count
  if (release_wanted_ || ring->settings().keep_idle.count() == 0) {
    free_ring();
  } else {
    start_idle_wait();
  }
  changed_.notify_all();
}

void Device::start_idle_wait() {
  if (idle_thread_runs_ || process_ends_) return;
  try {
    idle_thread_ = std::jthread([this](const std::stop_token& stop) { wait_until_idle(stop); });
    idle_thread_runs_ = true;
  } catch (const std::system_error&) {
    free_ring();  // no thread to be had: give the memory back now
  }
}

void Device::wait_until_idle(const std::stop_token& stop) {
  MutexLock lock(mutex_);
  while (ring_ && !stop.stop_requested()) {
    const uint64_t seen = uses_;
    const auto deadline = std::chrono::steady_clock::now() + ring_->settings().keep_idle;
    const bool used_again = changed_.wait_until(
        mutex_, stop, deadline, [&]() REQUIRES_LOCK(mutex_) { return !ring_ || uses_ != seen; });
    if (stop.stop_requested() || !ring_) break;
    if (!used_again && users_ == 0) {
      free_ring();
      break;
    }
    changed_.wait(mutex_, stop, [&]() REQUIRES_LOCK(mutex_) { return !ring_ || users_ == 0; });
  }
  idle_thread_runs_ = false;
}

void Device::stop_idle_thread() noexcept {
  std::jthread thread;
  {
    MutexLock lock(mutex_);
    process_ends_ = true;
    thread = std::move(idle_thread_);
  }
}

void Device::stop_idle_threads() noexcept {
  if (!driver_is_in_use()) return;
  Registry& known = registry();
  MutexLock lock(known.mutex);
  for (const auto& device : known.devices) device->stop_idle_thread();
}

bool Device::release_all() {
  Registry& known = registry();
  MutexLock lock(known.mutex);
  bool all = true;
  for (const auto& device : known.devices) all = device->release_ring() && all;
  return all;
}

bool Device::release_ring() {
  MutexLock lock(mutex_);
  if (!ring_) return true;
  if (users_ > 0) {
    release_wanted_ = true;
    return false;
  }
  free_ring();
  changed_.notify_all();
  return true;
}

void Device::condemn_ring(const PinnedRing& ring) {
  MutexLock lock(mutex_);
  if (ring_.get() != &ring) return;
  ring_->slots().close();
  keep_for_good(std::move(ring_));
  context_ = nullptr;  // stays retained: the old ring's users still work in it
  kernels_ = nullptr;
  users_ = 0;
  changed_.notify_all();
}

Function Device::kernel(const char* name) {
  MutexLock lock(mutex_);
  if (!kernels_) {
    const auto image = embedded_kernels();
    if (image.empty())
      throw Error(Errc::device, "this build of tensorizer has no CUDA kernels (nvcc was missing)");
    check(driver_, driver_.cuModuleLoadData(&kernels_, image.data()), "loading CUDA kernels");
  }
  Function function = nullptr;
  check(driver_, driver_.cuModuleGetFunction(&function, kernels_, name), "finding a CUDA kernel");
  return function;
}

RingStatus Device::status() const {
  MutexLock lock(mutex_);
  if (!ring_) return {};
  return {true, users_, ring_->settings().slots, ring_->slots().free_slots(),
          ring_->settings().slot_nbytes};
}

}  // namespace tensorizer::device::cuda
