#include "device/cuda/pinned_buffers.h"

#include <sys/mman.h>

#include <algorithm>
#include <cctype>
#include <fstream>
#include <utility>

#include "core/checked_math.h"

namespace tensorizer::device::cuda {
namespace {

constexpr uint64_t kPage = 4096;
constexpr unsigned kMaxSlots = 4096;
constexpr uint64_t kMaxNbytes = 64ULL << 30;
constexpr unsigned kFaultThreads = 4;  // zeroing pages is bound by memory bandwidth soon after
constexpr unsigned kFewestSlots = 2;
// A chunk of the cipher is never cut; smaller buffers than that are only made where asked for.
constexpr uint64_t kSmallestSlotNbytes = 2ULL << 20;

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

std::string mebibytes(uint64_t nbytes) { return std::to_string(nbytes >> 20) + " MiB"; }

}  // namespace

void validate(const PinnedSettings& settings) {
  if (settings.slots < kFewestSlots || settings.slots > kMaxSlots)
    throw Error(Errc::invalid_argument, "pinned slots: wanted 2 to " + std::to_string(kMaxSlots) +
                                            ", found " + std::to_string(settings.slots));
  if (settings.slot_nbytes < kPage || settings.slot_nbytes > kMaxNbytes / settings.slots)
    throw Error(Errc::invalid_argument,
                "bytes of a pinned slot: wanted 4096 or more, and 64 GiB or less in all slots, "
                "found " +
                    std::to_string(settings.slot_nbytes));
}

PinnedBuffers::PinnedBuffers(const Driver& driver, Ordinal device, const PinnedSettings& wanted)
    : driver_(driver), device_(device), wanted_(wanted) {
  unsigned slots = wanted.slots;
  uint64_t slot_nbytes = align_up(wanted.slot_nbytes, kPage);
  const uint64_t wanted_nbytes = slots * slot_nbytes;
  while (!pin(slots, slot_nbytes)) {
    if (slots > kFewestSlots) {
      slots = std::max(slots / 2, kFewestSlots);
    } else if (slot_nbytes >= 2 * kSmallestSlotNbytes) {
      slot_nbytes = align_up(slot_nbytes / 2, kPage);
    } else {
      pinned_ = false;
      mapping_ = HostMapping(slots * slot_nbytes, numa_node_of(driver_, device_), kFaultThreads);
      data_ = mapping_.data();
      break;
    }
  }
  buffer_nbytes_ = slot_nbytes;
  if (!pinned_) {
    shortage_ = "host memory cannot be pinned, copies will be slower: " + shortage_;
  } else if (slots * slot_nbytes < wanted_nbytes) {
    shortage_ = "only " + mebibytes(slots * slot_nbytes) + " of " + mebibytes(wanted_nbytes) +
                " of host memory could be pinned, copies may be slower: " + shortage_;
  } else {
    shortage_.clear();
  }
  try {
    for (unsigned slot = 0; slot < slots; ++slot) events_.push_back(take_event());
  } catch (...) {
    release();
    throw;
  }
  MutexLock lock(mutex_);
  for (unsigned slot = slots; slot-- > 0;) free_.push_back(slot);
}

PinnedBuffers::~PinnedBuffers() { release(); }

// False where the driver refuses; shortage_ says what it said.
bool PinnedBuffers::pin(unsigned slots, uint64_t slot_nbytes) {
  const uint64_t nbytes = slots * slot_nbytes;
  Result result = kNotSupported;
  if (registers_host_memory(driver_, device_)) {
    mapping_ = HostMapping(nbytes, numa_node_of(driver_, device_), kFaultThreads);
    result = driver_.cuMemHostRegister(mapping_.data(), mapping_.nbytes(), kHostRegisterPortable);
    if (result == kSuccess) {
      registered_ = true;
      data_ = mapping_.data();
      return true;
    }
    mapping_ = HostMapping();
  }
  void* address = nullptr;
  const Result second = driver_.cuMemHostAlloc(&address, nbytes, kHostAllocPortable);
  if (second == kSuccess) {
    data_ = allocated_ = static_cast<std::byte*>(address);
    ::madvise(address, nbytes, MADV_DONTDUMP);
    return true;
  }
  shortage_ = describe(driver_, second);
  return false;
}

const Kernels& PinnedBuffers::kernels() {
  MutexLock lock(kernels_mutex_);
  if (!kernels_ && kernels_refused_.empty()) {
    try {
      if (!pinned_) throw Error(Errc::device, "host memory cannot be pinned");
      kernels_ = std::make_unique<Kernels>(driver_, count(), buffer_nbytes_);
    } catch (const Error& error) {
      kernels_refused_ = error.what();
    }
  }
  if (!kernels_) throw Error(Errc::device, kernels_refused_);
  return *kernels_;
}

void PinnedBuffers::release() noexcept {
  {
    MutexLock lock(kernels_mutex_);
    kernels_.reset();
  }
  {
    MutexLock lock(mutex_);
    idle_streams_.clear();
    events_.insert(events_.end(), idle_events_.begin(), idle_events_.end());
    idle_events_.clear();
  }
  for (Event event : events_) static_cast<void>(driver_.cuEventDestroy(event));
  events_.clear();
  if (std::exchange(registered_, false))
    static_cast<void>(driver_.cuMemHostUnregister(mapping_.data()));
  if (allocated_) static_cast<void>(driver_.cuMemFreeHost(std::exchange(allocated_, nullptr)));
}

std::optional<unsigned> PinnedBuffers::try_take() {
  MutexLock lock(mutex_);
  if (closed_by_ != kSuccess || free_.empty() || has_waiters()) return std::nullopt;
  const unsigned buffer = free_.back();
  free_.pop_back();
  return buffer;
}

std::optional<unsigned> PinnedBuffers::take(const std::stop_token& stop,
                                            const std::atomic<bool>& given_up) {
  MutexLock lock(mutex_);
  waiters_.fetch_add(1, std::memory_order_relaxed);
  const bool awake = changed_.wait(mutex_, stop, [&]() REQUIRES_LOCK(mutex_) {
    return given_up.load() || closed_by_ != kSuccess || !free_.empty();
  });
  waiters_.fetch_sub(1, std::memory_order_relaxed);
  if (!awake || given_up.load() || closed_by_ != kSuccess) return std::nullopt;
  const unsigned buffer = free_.back();
  free_.pop_back();
  return buffer;
}

void PinnedBuffers::give_back(unsigned buffer) noexcept {
  {
    MutexLock lock(mutex_);
    free_.push_back(buffer);  // never allocates: the vector once held every buffer
  }
  changed_.notify_one();
}

void PinnedBuffers::wake_all() noexcept {
  {
    MutexLock lock(mutex_);
  }  // a waiter between its test and its sleep must not miss this
  changed_.notify_all();
}

void PinnedBuffers::close(Result why) noexcept {
  {
    MutexLock lock(mutex_);
    closed_by_ = why;
  }
  changed_.notify_all();
}

Result PinnedBuffers::closed_by() const {
  MutexLock lock(mutex_);
  return closed_by_;
}

unsigned PinnedBuffers::free_count() const {
  MutexLock lock(mutex_);
  return static_cast<unsigned>(free_.size());
}

std::unique_ptr<CopyStream> PinnedBuffers::take_stream() {
  {
    MutexLock lock(mutex_);
    if (!idle_streams_.empty()) {
      std::unique_ptr<CopyStream> stream = std::move(idle_streams_.back());
      idle_streams_.pop_back();
      return stream;
    }
  }
  return std::make_unique<CopyStream>(driver_, pinned_);
}

void PinnedBuffers::give_back(std::unique_ptr<CopyStream> stream) noexcept {
  try {
    MutexLock lock(mutex_);
    if (closed_by_ == kSuccess) idle_streams_.push_back(std::move(stream));
  } catch (...) {  // no memory to remember it: it is destroyed
  }
}

Event PinnedBuffers::take_event() {
  {
    MutexLock lock(mutex_);
    if (!idle_events_.empty()) {
      const Event event = idle_events_.back();
      idle_events_.pop_back();
      return event;
    }
  }
  Event event = nullptr;
  check(driver_, driver_.cuEventCreate(&event, kEventBlockingSync | kEventDisableTiming),
        "creating a CUDA event");
  return event;
}

void PinnedBuffers::give_back_event(Event event) noexcept {
  try {
    MutexLock lock(mutex_);
    idle_events_.push_back(event);
  } catch (...) {
    static_cast<void>(driver_.cuEventDestroy(event));
  }
}

}  // namespace tensorizer::device::cuda
