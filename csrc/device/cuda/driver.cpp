#include "device/cuda/driver.h"

#include <dlfcn.h>

#include <atomic>
#include <memory>
#include <type_traits>

#include "core/fork.h"
#include "core/sync.h"

namespace tensorizer::device::cuda {
namespace {

constexpr int kOldestDriver = 11030;   // the first that hands out functions by name and version
constexpr uint64_t kLegacyStream = 1;  // CU_GET_PROC_ADDRESS_LEGACY_STREAM: what handle 0 means

using ProcAddressV1 = Result (*)(const char* symbol, void** function, int version, uint64_t flags);
using ProcAddressV2 = Result (*)(const char* symbol, void** function, int version, uint64_t flags,
                                 int* status);

// Process lifetime, never destroyed: threads may still be inside the driver when static objects
// die.
struct Loader {
  Mutex mutex;
  std::string library GUARDED_BY(mutex) = "libcuda.so.1";
  std::unique_ptr<Driver> opened GUARDED_BY(mutex);  // functions found, cuInit not called
  std::atomic<const Driver*> ready{nullptr};  // set once, after cuInit; release/acquire publishes
  std::atomic<uint64_t> owner{0};             // 1 + the generation whose threads may lock `mutex`
};

Loader& loader() {
  static Loader* const instance = new Loader;
  return *instance;
}

class Symbols {
 public:
  explicit Symbols(const std::string& library)
      : handle_(::dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL)) {
    if (!handle_) {
      const char* why = ::dlerror();
      throw Error(Errc::device, "cannot open the CUDA driver library: " +
                                    std::string(why ? why : library.c_str()));
    }
    v2_ = reinterpret_cast<ProcAddressV2>(::dlsym(handle_, "cuGetProcAddress_v2"));
    v1_ = reinterpret_cast<ProcAddressV1>(::dlsym(handle_, "cuGetProcAddress"));
  }

  // The driver's own version; 0 when it does not even have that function.
  int version() const {
    using GetVersion = Result (*)(int*);
    auto get = reinterpret_cast<GetVersion>(::dlsym(handle_, "cuDriverGetVersion"));
    int version = 0;
    return get && get(&version) == kSuccess ? version : 0;
  }

  bool has_lookup() const noexcept { return v1_ || v2_; }

  // nullptr where the driver has no function of that name with the signature of `version`.
  void* find(const char* name, int version) const noexcept {
    void* function = nullptr;
    int status = 0;
    const Result result = v2_ ? v2_(name, &function, version, kLegacyStream, &status)
                              : v1_(name, &function, version, kLegacyStream);
    return result == kSuccess ? function : nullptr;
  }

 private:
  void* handle_;
  ProcAddressV1 v1_;
  ProcAddressV2 v2_;
};

std::unique_ptr<Driver> open_driver(const std::string& library) {
  const Symbols symbols(library);
  auto driver = std::make_unique<Driver>();
  driver->version = symbols.version();
  if (driver->version < kOldestDriver || !symbols.has_lookup())
    throw Error(Errc::device, "the CUDA driver is too old: expected 11.3 or newer, got version " +
                                  std::to_string(driver->version));
#define TENSORIZER_CUDA_FIND(name, version, parameters) \
  driver->name = reinterpret_cast<decltype(driver->name)>(symbols.find(#name, version));
  TENSORIZER_CUDA_REQUIRED(TENSORIZER_CUDA_FIND)
  TENSORIZER_CUDA_OPTIONAL(TENSORIZER_CUDA_FIND)
#undef TENSORIZER_CUDA_FIND
#define TENSORIZER_CUDA_DEMAND(name, version, parameters) \
  if (!driver->name) throw Error(Errc::device, "the CUDA driver has no function " #name);
  TENSORIZER_CUDA_REQUIRED(TENSORIZER_CUDA_DEMAND)
#undef TENSORIZER_CUDA_DEMAND
  return driver;
}

// Called before the mutex is touched: in a forked child it may be locked for ever by a thread that
// is not there.
void claim_for_this_process(Loader& state) {
  uint64_t expected = 0;
  const uint64_t self = fork_generation() + 1;
  if (state.owner.compare_exchange_strong(expected, self) || expected == self) return;
  throw Error(Errc::device,
              "CUDA cannot be used here: this process was forked after its parent had begun to use "
              "CUDA (start workers with the 'spawn' or 'forkserver' method)");
}

// Functions looked up, nothing initialised.
const Driver& opened_driver(Loader& state) REQUIRES_LOCK(state.mutex) {
  if (!state.opened) state.opened = open_driver(state.library);
  return *state.opened;
}

const Driver& initialise(Loader& state) {
  MutexLock lock(state.mutex);
  if (const Driver* ready = state.ready.load(std::memory_order_acquire)) return *ready;
  const Driver& driver = opened_driver(state);
  check(driver, driver.cuInit(0), "initialising the CUDA driver");
  state.ready.store(&driver, std::memory_order_release);
  state.owner.store(fork_generation() + 1);
  return driver;
}

// While nothing is in use, a forked child may try for itself.
void give_up_claim(Loader& state) {
  MutexLock lock(state.mutex);
  if (!state.ready.load(std::memory_order_acquire)) state.owner.store(0);
}

bool can_open(Loader& state) {
  MutexLock lock(state.mutex);
  try {
    opened_driver(state);
    return true;
  } catch (const Error&) {
    return false;
  }
}

}  // namespace

const Driver& driver() {
  Loader& state = loader();
  claim_for_this_process(state);
  if (const Driver* ready = state.ready.load(std::memory_order_acquire)) return *ready;
  try {
    return initialise(state);
  } catch (...) {
    give_up_claim(state);
    throw;
  }
}

bool driver_is_in_use() noexcept {
  const Loader& state = loader();
  return state.owner.load() == fork_generation() + 1 && state.ready.load(std::memory_order_acquire);
}

bool driver_is_present() {
  Loader& state = loader();
  claim_for_this_process(state);
  try {
    if (state.ready.load(std::memory_order_acquire)) return true;
    const bool found = can_open(state);
    give_up_claim(state);
    return found;
  } catch (...) {
    return false;
  }
}

void set_driver_library(const std::string& path) {
  Loader& state = loader();
  claim_for_this_process(state);
  MutexLock lock(state.mutex);
  if (!state.ready.load(std::memory_order_acquire)) {
    state.library = path;
    state.opened.reset();
    state.owner.store(0);
  } else if (path != state.library) {
    throw Error(Errc::invalid_argument,
                "the CUDA driver is already in use: its library can be chosen only before");
  }
}

std::string describe(const Driver& driver, Result result) {
  const char* name = nullptr;
  const char* text = nullptr;
  if (driver.cuGetErrorName(result, &name) != kSuccess || !name) name = "unknown CUDA error";
  if (driver.cuGetErrorString(result, &text) != kSuccess || !text) text = "no description";
  return std::string(name) + " (" + std::to_string(result) + "): " + text;
}

void throw_cuda_error(const Driver& driver, Result result, const std::string& action) {
  throw Error(result == kOutOfMemory ? Errc::out_of_memory : Errc::device,
              action + ": " + describe(driver, result));
}

}  // namespace tensorizer::device::cuda
