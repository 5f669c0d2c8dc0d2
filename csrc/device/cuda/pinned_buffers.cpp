#include "device/cuda/pinned_buffers.h"

#include <sys/mman.h>

#include <algorithm>
#include <cctype>
#include <fstream>
#include <system_error>
#include <utility>

#include "core/checked_math.h"
#include "device/cuda/context_guard.h"

namespace tensorizer::device::cuda {
namespace {

constexpr uint64_t kPage = 4096;
constexpr unsigned kMaxSlots = 4096;
constexpr uint64_t kMaxNbytes = 64ULL << 30;
constexpr unsigned kFewestSlots = 2;
constexpr uint64_t kBlockNbytes = 16ULL << 20;
// Drivers pin for one thread at a time; a second one faults in its pages meanwhile.
constexpr unsigned kGrowAtOnce = 2;
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
    throw Error(Errc::invalid_argument, "pinned slots: expected 2 to " + std::to_string(kMaxSlots) +
                                            ", got " + std::to_string(settings.slots));
  if (settings.slot_nbytes < kPage || settings.slot_nbytes > kMaxNbytes / settings.slots)
    throw Error(Errc::invalid_argument,
                "bytes of a pinned slot: expected 4096 or more, and 64 GiB or less in all slots, "
                "got " +
                    std::to_string(settings.slot_nbytes));
}

PinnedBuffers::PinnedBuffers(const Driver& driver, Ordinal device, Context context,
                             const PinnedSettings& wanted, SelfTestRecord& tested)
    : driver_(driver), device_(device), context_(context), wanted_(wanted), tested_(tested) {
  buffer_nbytes_ = align_up(wanted.slot_nbytes, kPage);
  most_ = wanted.slots;
  buffers_.resize(most_);
  const auto per_block =
      static_cast<unsigned>(std::max<uint64_t>(kFewestSlots, kBlockNbytes / buffer_nbytes_));
  unsigned first = std::min(most_, per_block);
  const uint64_t wanted_nbytes = most_ * buffer_nbytes_;
  while (!pin(0, first, buffer_nbytes_)) {
    if (first > kFewestSlots) {
      most_ = first = std::max(first / 2, kFewestSlots);
    } else if (buffer_nbytes_ >= 2 * kSmallestSlotNbytes) {
      buffer_nbytes_ = align_up(buffer_nbytes_ / 2, kPage);
      most_ = first;
    } else {
      pinned_ = false;
      most_ = first;
      mapping_ = map_host_memory(first * buffer_nbytes_, numa_node_of(driver_, device_));
      for (unsigned i = 0; i < first; ++i) buffers_[i] = mapping_.get() + i * buffer_nbytes_;
    }
    if (!pinned_) break;
  }
  set_free(first, wanted_nbytes);
  try {
    for (unsigned buffer = 0; buffer < most_; ++buffer) events_.push_back(take_event());
    batches_ = pinned_ && driver_.cuMemcpyBatchAsync != nullptr;
    for (SharedStream& shared : streams_) {
      MutexLock lock(shared.mutex);
      shared.stream = std::make_unique<CopyStream>(driver_, batches_);
    }
  } catch (...) {
    release();
    throw;
  }
}

PinnedBuffers::~PinnedBuffers() { release(); }

// After the first block.
void PinnedBuffers::set_free(unsigned first, uint64_t wanted_nbytes) {
  MutexLock lock(mutex_);
  if (!pinned_) {
    shortage_ = "host memory cannot be pinned, copies will be slower: " + shortage_;
  } else if (most_ * buffer_nbytes_ < wanted_nbytes) {
    shortage_ = "only " + mebibytes(most_ * buffer_nbytes_) + " of " + mebibytes(wanted_nbytes) +
                " of host memory could be pinned, copies may be slower: " + shortage_;
  } else {
    shortage_.clear();
  }
  begun_ = made_ = first;
  free_.reserve(most_);
  for (unsigned buffer = first; buffer-- > 0;) free_.push_back(buffer);
}

// Memory for `count` buffers from number `first` on. False where the driver refuses; shortage_ says
// what it said.
bool PinnedBuffers::pin(unsigned first, unsigned count, uint64_t slot_nbytes) {
  const uint64_t nbytes = count * slot_nbytes;
  std::byte* data = nullptr;
  Result result = kNotSupported;
  bool registered = false;
  if (first == 0) registers_ = registers_host_memory(driver_, device_);
  if (registers_) {
    if (first == 0) mapping_ = map_host_memory(most_ * slot_nbytes, numa_node_of(driver_, device_));
    data = mapping_.get() + first * slot_nbytes;
    fault_in({data, nbytes});
    result = driver_.cuMemHostRegister(data, nbytes, kHostRegisterPortable);
    registered = result == kSuccess;
    if (first == 0) registers_ = registered;  // further blocks are made as the first one was
  }
  if (!registered && !registers_) {
    if (first == 0) mapping_ = nullptr;
    void* address = nullptr;
    result = driver_.cuMemHostAlloc(&address, nbytes, kHostAllocPortable);
    data = static_cast<std::byte*>(address);
    if (result == kSuccess) ::madvise(address, nbytes, MADV_DONTDUMP);
  }
  MutexLock lock(mutex_);
  if (result != kSuccess) {
    shortage_ = describe(driver_, result);
    return false;
  }
  blocks_.push_back({data, registered});
  for (unsigned i = 0; i < count; ++i) buffers_[first + i] = data + i * slot_nbytes;
  return true;
}

// One more block, where there may be one and few others grow. True where a buffer may be free now.
bool PinnedBuffers::grow() {
  const auto per_block =
      static_cast<unsigned>(std::max<uint64_t>(1, kBlockNbytes / buffer_nbytes_));
  unsigned first = 0, count = 0;
  {
    MutexLock lock(mutex_);
    if (begun_ == most_ || growing_ == kGrowAtOnce || closed_by_ != kSuccess) return false;
    first = begun_;
    count = std::min(most_ - begun_, per_block);
    begun_ += count;
    ++growing_;
  }
  const bool grown = pin(first, count, buffer_nbytes_);
  {
    MutexLock lock(mutex_);
    --growing_;
    if (grown) {
      made_ += count;
      for (unsigned buffer = first + count; buffer-- > first;) free_.push_back(buffer);
    } else {
      begun_ = most_;  // what is there has to do
      shortage_ = "only " + mebibytes(made_ * buffer_nbytes_) + " of " +
                  mebibytes(most_ * buffer_nbytes_) +
                  " of host memory could be pinned, copies may be slower: " + shortage_;
    }
  }
  changed_.notify_all();
  return grown;
}

unsigned PinnedBuffers::count() const {
  MutexLock lock(mutex_);
  return made_;
}

std::string PinnedBuffers::shortage() const {
  MutexLock lock(mutex_);
  return shortage_;
}

void PinnedBuffers::start_kernels() {
  {
    MutexLock lock(kernels_mutex_);
    if (std::exchange(kernels_begun_, true)) return;
    try {
      kernels_job_ = ProcessPool::instance().start([this] { make_kernels(); });
      return;
    } catch (const std::system_error&) {  // no thread to be had: here, then
    }
  }
  make_kernels();
}

void PinnedBuffers::make_kernels() noexcept {
  std::unique_ptr<Kernels> made;
  std::string refused;
  try {
    if (!pinned_) throw Error(Errc::device, "host memory cannot be pinned");
    const ContextGuard current(driver_, context_);
    made = std::make_unique<Kernels>(driver_, tested_, most_, buffer_nbytes_);
  } catch (const std::exception& error) {
    refused = error.what();
  }
  {
    MutexLock lock(kernels_mutex_);
    kernels_ = std::move(made);
    kernels_refused_ = std::move(refused);
  }
  kernels_changed_.notify_all();
}

const Kernels* PinnedBuffers::kernels_now() const {
  MutexLock lock(kernels_mutex_);
  if (!kernels_refused_.empty()) throw Error(Errc::device, kernels_refused_);
  return kernels_.get();
}

const Kernels* PinnedBuffers::kernels(const std::stop_token& stop) {
  start_kernels();
  {
    MutexLock lock(kernels_mutex_);
    if (!kernels_changed_.wait(kernels_mutex_, stop, [&]() REQUIRES_LOCK(kernels_mutex_) {
          return kernels_ || !kernels_refused_.empty();
        }))
      throw Error(Errc::cancelled, "cancelled");
  }
  return kernels_now();
}

void PinnedBuffers::release() noexcept {
  ProcessJob job;
  {
    MutexLock lock(kernels_mutex_);
    job = kernels_job_;
  }
  job.join();
  {
    MutexLock lock(kernels_mutex_);
    kernels_.reset();
  }
  for (SharedStream& shared : streams_) {
    MutexLock lock(shared.mutex);
    shared.stream.reset();
  }
  MutexLock lock(mutex_);
  events_.insert(events_.end(), idle_events_.begin(), idle_events_.end());
  idle_events_.clear();
  for (Event event : events_) static_cast<void>(driver_.cuEventDestroy(event));
  events_.clear();
  for (; !blocks_.empty(); blocks_.pop_back()) {  // the newest first
    const Block& block = blocks_.back();
    static_cast<void>(block.registered ? driver_.cuMemHostUnregister(block.data)
                                       : driver_.cuMemFreeHost(block.data));
  }
}

std::optional<unsigned> PinnedBuffers::try_take() {
  const auto is_empty = [&] {
    MutexLock lock(mutex_);
    return free_.empty();
  };
  if (is_empty() && !grow()) return std::nullopt;
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
