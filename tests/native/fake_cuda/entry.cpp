// The entry points of the driver, and the lookup that hands them out by name and version.
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <numeric>

#include "../host_kernels.h"
#include "device/chunk_to_open.h"
#include "host_memory.h"
#include "model.h"

#define API extern "C" __attribute__((visibility("default")))

namespace fake_cuda {
namespace {

using CUresult = int;
using CUdevice = int;
using CUdeviceptr = unsigned long long;
using CUcontext = ContextTag*;
using CUstream = StreamTag*;
using CUevent = EventTag*;
using Lock = std::unique_lock<std::mutex>;

constexpr CUresult kInvalidValue = 1;
constexpr CUresult kNotInitialised = 3;
constexpr CUresult kInvalidDevice = 101;
constexpr CUresult kInvalidContext = 201;
constexpr CUresult kInvalidHandle = 400;
constexpr CUresult kNotFound = 500;
constexpr CUresult kNotReady = 600;
constexpr CUresult kAlreadyRegistered = 712;
constexpr CUresult kNotRegistered = 713;
constexpr CUresult kNotSupported = 801;
constexpr unsigned char kPoison = 0xdb;  // what a destination holds until its copy has run

// The contexts that this thread has pushed; it must pop them all before it ends.
struct ContextStack {
  std::vector<CUcontext> contexts;
  ~ContextStack() {
    if (!contexts.empty()) violation("a thread ended with a context still pushed");
  }
};
thread_local ContextStack context_stack;

CUcontext current_context() {
  return context_stack.contexts.empty() ? nullptr : context_stack.contexts.back();
}

// The beginning of every call: the lock, and the code to return at once if it is not 0.
struct Call {
  explicit Call(const char* name, bool needs_context = true, bool works_when_lost = false)
      : lock(model().mutex, std::defer_lock) {
    Model& m = model();
    m.link->spend_call();
    lock.lock();
    if (m.initialised_by != 0 && m.initialised_by != ::getpid())
      violation(std::string(name) + " was called in a forked child");
    code = m.fault(name);
    if (works_when_lost && code == m.lost) code = 0;
    if (code == 0 && m.initialised_by == 0 && std::strcmp(name, "cuInit") != 0)
      code = kNotInitialised;
    if (code == 0 && needs_context && !current_context()) code = kInvalidContext;
  }
  Lock lock;
  CUresult code;
};

// The stream behind a handle. Default streams are good for events alone, and for nothing that the
// program enqueues.
std::shared_ptr<StreamTag> stream_of(CUstream handle, bool default_allowed) {
  Model& m = model();
  const auto number = reinterpret_cast<uintptr_t>(handle);
  if (number <= 2) {
    if (!default_allowed) violation("work was put on the default stream");
    if (number == 2) violation("the per-thread default stream was used");
    return m.default_streams[static_cast<size_t>(current_context()->device)];
  }
  const auto found = m.streams.find(handle);
  if (found == m.streams.end()) violation("a stream was used that does not exist any more");
  return found->second;
}

EventTag& event_of(CUevent handle) {
  if (model().events.count(handle) == 0)
    violation("an event was used that does not exist any more");
  return *handle;
}

bool execution_fails() {
  const Lock lock(model().mutex);
  return model().fault("execute") != 0;
}

uint64_t checksum(const std::byte* bytes, uint64_t nbytes) {
  uint64_t sum = nbytes;
  uint64_t word = 0;
  uint64_t at = 0;
  for (; at + sizeof word <= nbytes; at += sizeof word) {
    std::memcpy(&word, bytes + at, sizeof word);
    sum = (sum ^ word) * 0x9e3779b97f4a7c15ULL;
    sum ^= sum >> 29;
  }
  for (; at < nbytes; ++at) sum = (sum ^ static_cast<uint64_t>(bytes[at])) * 0x100000001b3ULL;
  return sum;
}

// Where the bytes of a range are; notes the access. Ends the process where the range is no live
// memory of the kind.
std::byte* locate(const void* address, uint64_t nbytes, StreamTag& stream, bool on_device,
                  bool writes) {
  Model& m = model();
  Block* block = m.find(on_device ? m.device_blocks : m.host_blocks, address, nbytes);
  if (!block) {
    if (on_device && m.any_address)
      return const_cast<std::byte*>(static_cast<const std::byte*>(address));
    violation(on_device ? "a copy touches device memory that is not allocated"
                        : "an asynchronous copy uses host memory that is not pinned");
  }
  if (on_device && block->device != stream.device)
    violation("a copy runs on a stream of another device than its memory");
  m.note_access(*block, address, nbytes, stream, writes);
  return block->bytes + (static_cast<const std::byte*>(address) - block->address);
}

// A model of time has no checksums.
uint64_t sum_of(const std::byte* bytes, uint64_t nbytes) {
  return model().link->is_on() ? 0 : checksum(bytes, nbytes);
}

// One copy that will run on a stream.
struct PlannedCopy {
  std::byte* to;
  const std::byte* from;
  uint64_t nbytes;
  uint64_t source_sum;  // of host sources: what the copy must find when it runs
  bool to_device;

  void run() const {
    if (model().link->discards(nbytes)) return;
    if (to_device && source_sum != sum_of(from, nbytes))
      violation("a slot was changed before the copies from it had run");
    std::memcpy(to, from, nbytes);
  }
};

// Memory that is not pinned: the driver reads it before the call returns.
bool is_pageable(const void* address, uint64_t nbytes) {
  return model().pageable_allowed && !model().find(model().host_blocks, address, nbytes);
}

PlannedCopy plan_to_device(CUdeviceptr to, const void* from, size_t nbytes, StreamTag& stream) {
  const std::byte* source = locate(from, nbytes, stream, false, false);
  const std::vector<std::byte>& forbidden = model().forbidden;
  if (!forbidden.empty() &&
      std::search(source, source + nbytes, forbidden.begin(), forbidden.end()) != source + nbytes)
    violation("a copy carries bytes that may not leave the host");
  std::byte* target = locate(reinterpret_cast<void*>(to), nbytes, stream, true, true);
  return {target, source, nbytes, sum_of(source, nbytes), true};
}

PlannedCopy plan_to_host(void* to, CUdeviceptr from, size_t nbytes, StreamTag& stream) {
  const std::byte* source = locate(reinterpret_cast<void*>(from), nbytes, stream, true, false);
  const Block* block = model().find(model().host_blocks, to, nbytes);
  const bool at_rest = block && model().is_at_rest(*block, to, nbytes);
  std::byte* target = locate(to, nbytes, stream, false, true);
  if (at_rest && !model().link->is_on()) std::memset(target, kPoison, nbytes);
  return {target, source, nbytes, 0, false};
}

CUresult enqueue_copies(std::vector<PlannedCopy> copies, const std::shared_ptr<StreamTag>& stream) {
  Cost cost{copies.front().to_device ? Engine::up : Engine::down, 0,
            static_cast<unsigned>(copies.size())};
  for (const PlannedCopy& copy : copies) cost.nbytes += copy.nbytes;
  model().enqueue(stream, {[copies = std::move(copies)] {
                             for (const PlannedCopy& copy : copies) {
                               if (execution_fails()) return;
                               copy.run();
                             }
                           },
                           {},
                           cost});
  return 0;
}

bool is_valid_device(CUdevice device) { return device >= 0 && device < model().devices; }

}  // namespace

API CUresult cuInit(unsigned flags) {
  const Call call("cuInit", false);
  if (call.code) return call.code;
  if (flags != 0) return kInvalidValue;
  if (model().devices == 0) return 100;
  model().initialised_by = ::getpid();
  return 0;
}

API CUresult cuDriverGetVersion(int* version) {
  *version = model().version;
  return 0;
}

API CUresult cuGetErrorName(CUresult error, const char** name) {
  switch (error) {
    case 0:
      *name = "CUDA_SUCCESS";
      return 0;
    case 1:
      *name = "CUDA_ERROR_INVALID_VALUE";
      return 0;
    case 2:
      *name = "CUDA_ERROR_OUT_OF_MEMORY";
      return 0;
    case 700:
      *name = "CUDA_ERROR_ILLEGAL_ADDRESS";
      return 0;
    case 719:
      *name = "CUDA_ERROR_LAUNCH_FAILED";
      return 0;
    case 999:
      *name = "CUDA_ERROR_UNKNOWN";
      return 0;
    default:
      *name = nullptr;
      return kInvalidValue;
  }
}

API CUresult cuGetErrorString(CUresult, const char** text) {
  *text = "an error of the fake driver";
  return 0;
}

API CUresult cuDeviceGetCount(int* count) {
  const Call call("cuDeviceGetCount", false);
  if (call.code) return call.code;
  *count = model().devices;
  return 0;
}

API CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  const Call call("cuDeviceGet", false);
  if (call.code) return call.code;
  if (!is_valid_device(ordinal)) return kInvalidDevice;
  *device = ordinal;
  return 0;
}

API CUresult cuDeviceGetName(char* name, int nbytes, CUdevice device) {
  const Call call("cuDeviceGetName", false);
  if (call.code) return call.code;
  if (!is_valid_device(device)) return kInvalidDevice;
  std::snprintf(name, static_cast<size_t>(nbytes), "Fake device %d", device);
  return 0;
}

API CUresult cuDeviceGetAttribute(int* value, int attribute, CUdevice device) {
  const Call call("cuDeviceGetAttribute", false);
  if (call.code) return call.code;
  if (!is_valid_device(device)) return kInvalidDevice;
  constexpr int kHostRegisterSupported = 99;
  const bool unified = attribute != 0 && attribute == model().unified;
  *value = unified || (attribute == kHostRegisterSupported && model().can_register) ? 1 : 0;
  return 0;
}

API CUresult cuDeviceGetPCIBusId(char* text, int nbytes, CUdevice device) {
  const Call call("cuDeviceGetPCIBusId", false);
  if (call.code) return call.code;
  std::snprintf(text, static_cast<size_t>(nbytes), "FFFF:%02X:00.0", device);
  return 0;
}

API CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  const Call call("cuDevicePrimaryCtxRetain", false);
  if (call.code) return call.code;
  if (!is_valid_device(device)) return kInvalidDevice;
  *context = model().contexts[static_cast<size_t>(device)].get();
  ++(*context)->retained;
  return 0;
}

API CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
  const Call call("cuDevicePrimaryCtxRelease", false, true);
  if (call.code) return call.code;
  ContextTag& context = *model().contexts[static_cast<size_t>(device)];
  if (context.retained == 0) violation("a context was released more often than retained");
  --context.retained;
  return 0;
}

API CUresult cuCtxPushCurrent_v2(CUcontext context) {
  const Call call("cuCtxPushCurrent", false, true);
  if (call.code) return call.code;
  if (context->retained == 0) violation("a context was used that nobody retains");
  context_stack.contexts.push_back(context);
  return 0;
}

API CUresult cuCtxPopCurrent_v2(CUcontext* context) {
  const Call call("cuCtxPopCurrent", false, true);
  if (!current_context()) return kInvalidContext;
  *context = current_context();
  context_stack.contexts.pop_back();
  return 0;
}

API CUresult cuThreadExchangeStreamCaptureMode(int* mode) {
  const Call call("cuThreadExchangeStreamCaptureMode", false, true);
  if (call.code) return call.code;
  static thread_local int current = 0;
  std::swap(*mode, current);
  return 0;
}

API CUresult cuStreamCreate(CUstream* stream, unsigned flags) {
  const Call call("cuStreamCreate");
  if (call.code) return call.code;
  if (flags != 1) violation("a stream was created that synchronises with the default stream");
  *stream = model().make_stream(current_context()->device, false).get();
  return 0;
}

API CUresult cuStreamDestroy_v2(CUstream stream) {
  Call call("cuStreamDestroy", false);
  const auto kept = stream_of(stream, false);  // even a lost device lets go of its streams
  model().close_stream(call.lock, kept);
  return call.code;
}

API CUresult cuStreamSynchronize(CUstream stream) {
  Call call("cuStreamSynchronize");
  if (call.code) return call.code;
  const auto kept = stream_of(stream, false);
  EventTag now;
  model().record(now, kept);
  model().wait_for_record(call.lock, now.record);
  return model().lost;
}

API CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags) {
  const Call call("cuStreamWaitEvent");
  if (call.code) return call.code;
  if (flags != 0) return kInvalidValue;
  const auto kept = stream_of(stream, true);
  const auto record = event_of(event).record;
  if (!record) return 0;
  kept->clock.merge(record->clock);
  model().enqueue(kept, {{}, [record] { return record->stream->completed >= record->number; }});
  return 0;
}

API CUresult cuStreamIsCapturing(CUstream stream, int* status) {
  const Call call("cuStreamIsCapturing");
  if (call.code) return call.code;
  *status = stream_of(stream, true)->capturing ? 1 : 0;
  return 0;
}

API CUresult cuEventCreate(CUevent* event, unsigned) {
  const Call call("cuEventCreate");
  if (call.code) return call.code;
  *event = new EventTag{current_context()->device, nullptr};
  model().events.insert(*event);
  return 0;
}

API CUresult cuEventDestroy_v2(CUevent event) {
  const Call call("cuEventDestroy", false);
  static_cast<void>(event_of(event));
  model().events.erase(event);
  delete event;
  return call.code;
}

API CUresult cuEventRecord(CUevent event, CUstream stream) {
  const Call call("cuEventRecord");
  if (call.code) return call.code;
  const auto kept = stream_of(stream, true);
  if (kept->capturing) violation("an event was recorded on a stream that captures a graph");
  if (kept->device != event_of(event).device) return kInvalidHandle;
  model().record(event_of(event), kept);
  return 0;
}

API CUresult cuEventQuery(CUevent event) {
  const Call call("cuEventQuery");
  if (call.code) return call.code;
  const auto record = event_of(event).record;
  if (!record) return 0;
  if (record->stream->completed < record->number) return kNotReady;
  model().host.merge(record->clock);
  return 0;
}

API CUresult cuEventSynchronize(CUevent event) {
  Call call("cuEventSynchronize");
  if (call.code) return call.code;
  const auto record = event_of(event).record;
  if (record) model().wait_for_record(call.lock, record);
  return model().lost;
}

namespace {

void note_pinned() {
  uint64_t nbytes = 0;
  for (const auto& [address, block] : model().host_blocks) nbytes += block->nbytes;
  model().link->note_pinned(nbytes);
}

}  // namespace

API CUresult cuMemHostRegister_v2(void* address, size_t nbytes, unsigned) {
  model().link->pin(nbytes);
  const Call call("cuMemHostRegister");
  if (call.code) return call.code;
  if (!model().can_register) return kNotSupported;
  if (!address || nbytes == 0) return kInvalidValue;
  if (model().find(model().host_blocks, address, 1)) return kAlreadyRegistered;
  auto block = std::make_unique<Block>();
  block->address = block->bytes = static_cast<std::byte*>(address);
  block->nbytes = nbytes;
  model().host_blocks[block->address] = std::move(block);
  note_pinned();
  return 0;
}

API CUresult cuMemHostUnregister(void* address) {
  const Call call("cuMemHostUnregister");
  const auto found = model().host_blocks.find(static_cast<std::byte*>(address));
  if (found == model().host_blocks.end() || found->second->allocated) return kNotRegistered;
  if (model().lost == 0)
    model().require_rest(*found->second, {}, "pinned memory was unregistered under a copy");
  model().host_blocks.erase(found);
  return call.code;
}

API CUresult cuMemHostAlloc(void** address, size_t nbytes, unsigned) {
  model().link->pin(nbytes);
  const Call call("cuMemHostAlloc");
  if (call.code) return call.code;
  auto block = std::make_unique<Block>();
  block->allocated = true;
  block->address = block->bytes = map_host(nbytes);
  block->nbytes = nbytes;
  *address = block->address;
  model().host_blocks[block->address] = std::move(block);
  note_pinned();
  return 0;
}

API CUresult cuMemFreeHost(void* address) {
  const Call call("cuMemFreeHost");
  const auto found = model().host_blocks.find(static_cast<std::byte*>(address));
  if (found == model().host_blocks.end() || !found->second->allocated) return kInvalidValue;
  if (model().lost == 0)
    model().require_rest(*found->second, {}, "pinned memory was freed under a copy");
  unmap(found->second->bytes, found->second->nbytes);
  model().host_blocks.erase(found);
  return call.code;
}

API CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void* from, size_t nbytes,
                                  CUstream stream) {
  const Call call("cuMemcpyHtoDAsync");
  if (call.code) return call.code;
  const auto kept = stream_of(stream, false);
  if (is_pageable(from, nbytes)) {
    std::byte* target = locate(reinterpret_cast<void*>(to), nbytes, *kept, true, true);
    const auto* source = static_cast<const std::byte*>(from);
    model().enqueue(kept, {[target, bytes = std::vector<std::byte>(source, source + nbytes)] {
                             std::memcpy(target, bytes.data(), bytes.size());
                           },
                           {}});
    return 0;
  }
  return enqueue_copies({plan_to_device(to, from, nbytes, *kept)}, kept);
}

API CUresult cuMemcpyDtoHAsync_v2(void* to, CUdeviceptr from, size_t nbytes, CUstream stream) {
  Call call("cuMemcpyDtoHAsync");
  if (call.code) return call.code;
  const auto kept = stream_of(stream, false);
  if (is_pageable(to, nbytes)) {
    const std::byte* source = locate(reinterpret_cast<void*>(from), nbytes, *kept, true, false);
    model().enqueue(kept, {[=] { std::memcpy(to, source, nbytes); }, {}});
    EventTag now;
    model().record(now, kept);
    model().wait_for_record(call.lock, now.record);
    return model().lost;
  }
  return enqueue_copies({plan_to_host(to, from, nbytes, *kept)}, kept);
}

API CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t nbytes, CUstream stream) {
  const Call call("cuMemsetD8Async");
  if (call.code) return call.code;
  if (nbytes == 0) return kInvalidValue;
  const auto kept = stream_of(stream, false);
  std::byte* target = locate(reinterpret_cast<void*>(to), nbytes, *kept, true, true);
  model().enqueue(kept, {[=] {
                           if (!execution_fails()) std::memset(target, value, nbytes);
                         },
                         {}});
  return 0;
}

API CUresult cuMemAlloc_v2(CUdeviceptr* address, size_t nbytes) {
  const Call call("cuMemAlloc");
  if (call.code) return call.code;
  if (nbytes == 0) return kInvalidValue;
  auto block = std::make_unique<Block>();
  map_device(*block, nbytes);
  block->device = current_context()->device;
  block->allocated = true;
  *address = reinterpret_cast<CUdeviceptr>(block->address);
  model().device_blocks[block->address] = std::move(block);
  return 0;
}

API CUresult cuMemFree_v2(CUdeviceptr address) {
  const Call call("cuMemFree");
  const auto found = model().device_blocks.find(reinterpret_cast<std::byte*>(address));
  if (found == model().device_blocks.end() || !found->second->allocated) return kInvalidValue;
  Block& block = *found->second;
  if (model().lost == 0) {
    model().require_rest(block, {}, "device memory was freed under a copy or a kernel");
    // Every area that a kernel was told secrets in is zeroed behind it.
    if (model().control.count(block.address) != 0 &&
        std::any_of(block.bytes, block.bytes + block.nbytes,
                    [](std::byte byte) { return byte != std::byte{0}; }))
      violation("what kernels were told was left in device memory");
    unmap(block.address, block.nbytes);
    unmap(block.bytes, block.nbytes);
  } else {
    static_cast<void>(found->second.release());
  }
  model().control.erase(reinterpret_cast<std::byte*>(address));
  model().device_blocks.erase(found);
  return call.code;
}

API CUresult cuModuleLoadData(ModuleTag** module, const void* image) {
  model().link->load_module();
  const Call call("cuModuleLoadData");
  if (call.code) return call.code;
  const std::string_view text(static_cast<const char*>(image));
  constexpr CUresult kInvalidImage = 218;
  if (text.substr(0, 11) != "// sources " || text.find(".target sm_70") == text.npos)
    return kInvalidImage;
  *module = new ModuleTag{current_context()->device};
  model().modules.insert(*module);
  return 0;
}

API CUresult cuModuleUnload(ModuleTag* module) {
  const Call call("cuModuleUnload");
  if (model().modules.erase(module) == 0 && model().lost == 0)
    violation("a module was unloaded that does not exist any more");
  delete module;
  return call.code;
}

API CUresult cuModuleGetFunction(FunctionTag** function, ModuleTag* module, const char* name) {
  const Call call("cuModuleGetFunction");
  if (call.code) return call.code;
  if (model().modules.count(module) == 0) return kInvalidHandle;
  if (std::string_view(name).substr(0, 3) != "tz_") return kNotFound;
  model().functions.push_back(std::make_unique<FunctionTag>(FunctionTag{module, name}));
  *function = model().functions.back().get();
  return 0;
}

namespace {

// Where the bytes are that a kernel finds at an address of the device.
uint64_t bytes_at(uint64_t address, uint64_t nbytes) {
  const Lock lock(model().mutex);
  auto* const seen = reinterpret_cast<std::byte*>(address);
  const Block* const block = model().find(model().device_blocks, seen, nbytes);
  if (!block) {
    if (model().any_address) return address;
    violation("a kernel touches device memory that is not allocated");
  }
  return reinterpret_cast<uint64_t>(block->bytes + (seen - block->address));
}

// One kernel that will run on a stream.
struct PlannedKernel {
  std::string name;
  unsigned blocks;
  std::vector<uint64_t> parameters;  // addresses as the host sees them
  uint64_t seed;

  void run() {
    if (execution_fails()) return;
    if (model().wrong_kernels) return;
    if (model().link->discards()) {
      if (name == "tz_open")
        std::fill_n(reinterpret_cast<uint32_t*>(parameters[3]), blocks,
                    uint32_t{tensorizer::device::kVerdictGenuine});
      return;
    }
    // With copies of the chunks that the kernel is told of, whose addresses are made the host's.
    using tensorizer::device::ChunkToOpen;
    const auto* const chunk_of = reinterpret_cast<const uint32_t*>(parameters[1]);
    const auto* const given = reinterpret_cast<const ChunkToOpen*>(parameters[0]);
    const uint32_t count = *std::max_element(chunk_of, chunk_of + blocks) + 1;
    std::vector<ChunkToOpen> chunks(given, given + count);
    for (ChunkToOpen& chunk : chunks) chunk.address = bytes_at(chunk.address, chunk.nbytes);
    uint64_t first = reinterpret_cast<uint64_t>(chunks.data());
    std::vector<void*> pointers = {&first};
    for (size_t i = 1; i < parameters.size(); ++i) pointers.push_back(&parameters[i]);
    if (host_kernel_run(name.c_str(), blocks, pointers.data(), HOST_SHUFFLED, seed) != 0)
      violation("a kernel is unknown, or left secrets in shared memory");
  }
};

}  // namespace

API CUresult cuLaunchKernel(FunctionTag* function, unsigned x, unsigned y, unsigned z,
                            unsigned threads, unsigned threads_y, unsigned threads_z,
                            unsigned shared, CUstream stream, void** parameters, void** extra) {
  const Call call("cuLaunchKernel");
  if (call.code) return call.code;
  if (model().modules.count(function->module) == 0)
    violation("a kernel was started whose module is unloaded");
  if (x == 0 || y != 1 || z != 1 || threads != 256 || threads_y != 1 || threads_z != 1 ||
      shared != 0 || extra)
    return kInvalidValue;
  const auto kept = stream_of(stream, false);
  const size_t count = function->name == "tz_mac" ? 3 : 4;
  PlannedKernel kernel{function->name, x, {}, model().random()};
  for (size_t i = 0; i < count; ++i) {
    auto* const address = *static_cast<std::byte**>(parameters[i]);
    // What follows the first word is known to the kernel alone.
    kernel.parameters.push_back(
        reinterpret_cast<uint64_t>(locate(address, 4, *kept, true, i >= 2)));
    model().control.insert(model().find(model().device_blocks, address, 4)->address);
  }
  // Each thread block takes 128 KiB; the first pass is paid for with the second one.
  const uint64_t nbytes = function->name == "tz_open" ? x * (uint64_t{128} << 10) : 0;
  model().enqueue(kept, {[kernel]() mutable { kernel.run(); }, {}, {Engine::kernel, nbytes, 1}});
  return 0;
}

namespace {

// As the driver declares it: how a source is read, two hints, flags.
struct BatchAttributes {
  int source_access_order;
  int hints[4];
  unsigned flags;
};

CUresult copy_batch(CUdeviceptr* to, CUdeviceptr* from, size_t* sizes, size_t count,
                    BatchAttributes* attributes, size_t* starts, size_t attribute_count,
                    CUstream stream) {
  const Call call("cuMemcpyBatchAsync");
  if (call.code) return call.code;
  if (count == 0 || attribute_count == 0 || attribute_count > count || starts[0] != 0)
    return kInvalidValue;
  for (size_t i = 0; i < attribute_count; ++i)
    if (attributes[i].source_access_order < 1 || attributes[i].source_access_order > 3)
      return kInvalidValue;
  const auto kept = stream_of(stream, false);
  std::vector<PlannedCopy> copies;
  for (size_t i = 0; i < count; ++i) {
    if (sizes[i] == 0) return kInvalidValue;
    auto* source = reinterpret_cast<void*>(from[i]);
    const bool to_device = model().find(model().host_blocks, source, sizes[i]) != nullptr;
    copies.push_back(to_device
                         ? plan_to_device(to[i], source, sizes[i], *kept)
                         : plan_to_host(reinterpret_cast<void*>(to[i]), from[i], sizes[i], *kept));
  }
  std::shuffle(copies.begin(), copies.end(), model().random);  // a batch has no order inside
  return enqueue_copies(std::move(copies), kept);
}

}  // namespace

API CUresult cuMemcpyBatchAsync_v12080(CUdeviceptr* to, CUdeviceptr* from, size_t* sizes,
                                       size_t count, BatchAttributes* attributes, size_t* starts,
                                       size_t attribute_count, size_t* failed, CUstream stream) {
  *failed = SIZE_MAX;
  return copy_batch(to, from, sizes, count, attributes, starts, attribute_count, stream);
}

API CUresult cuMemcpyBatchAsync_v13000(CUdeviceptr* to, CUdeviceptr* from, size_t* sizes,
                                       size_t count, BatchAttributes* attributes, size_t* starts,
                                       size_t attribute_count, CUstream stream) {
  return copy_batch(to, from, sizes, count, attributes, starts, attribute_count, stream);
}

namespace {

CUresult asked_for_an_old_signature() { violation("a function was called by an old signature"); }

struct Symbol {
  const char* name;
  int version;
  void* function;
};

#define FAKE_SYMBOL(name, version, function) {#name, version, reinterpret_cast<void*>(&function)}
#define FAKE_OLD(name, version) FAKE_SYMBOL(name, version, asked_for_an_old_signature)

const Symbol kSymbols[] = {
    FAKE_SYMBOL(cuInit, 2000, cuInit),
    FAKE_SYMBOL(cuGetErrorName, 6000, cuGetErrorName),
    FAKE_SYMBOL(cuGetErrorString, 6000, cuGetErrorString),
    FAKE_SYMBOL(cuDeviceGetCount, 2000, cuDeviceGetCount),
    FAKE_SYMBOL(cuDeviceGet, 2000, cuDeviceGet),
    FAKE_SYMBOL(cuDeviceGetName, 2000, cuDeviceGetName),
    FAKE_SYMBOL(cuDeviceGetAttribute, 2000, cuDeviceGetAttribute),
    FAKE_SYMBOL(cuDeviceGetPCIBusId, 4010, cuDeviceGetPCIBusId),
    FAKE_SYMBOL(cuDevicePrimaryCtxRetain, 7000, cuDevicePrimaryCtxRetain),
    FAKE_OLD(cuDevicePrimaryCtxRelease, 7000),
    FAKE_SYMBOL(cuDevicePrimaryCtxRelease, 11000, cuDevicePrimaryCtxRelease_v2),
    FAKE_OLD(cuCtxPushCurrent, 2000),
    FAKE_SYMBOL(cuCtxPushCurrent, 4000, cuCtxPushCurrent_v2),
    FAKE_OLD(cuCtxPopCurrent, 2000),
    FAKE_SYMBOL(cuCtxPopCurrent, 4000, cuCtxPopCurrent_v2),
    FAKE_SYMBOL(cuThreadExchangeStreamCaptureMode, 10010, cuThreadExchangeStreamCaptureMode),
    FAKE_SYMBOL(cuStreamCreate, 2000, cuStreamCreate),
    FAKE_OLD(cuStreamDestroy, 2000),
    FAKE_SYMBOL(cuStreamDestroy, 4000, cuStreamDestroy_v2),
    FAKE_SYMBOL(cuStreamSynchronize, 2000, cuStreamSynchronize),
    FAKE_SYMBOL(cuStreamWaitEvent, 3020, cuStreamWaitEvent),
    FAKE_SYMBOL(cuStreamIsCapturing, 10000, cuStreamIsCapturing),
    FAKE_SYMBOL(cuEventCreate, 2000, cuEventCreate),
    FAKE_OLD(cuEventDestroy, 2000),
    FAKE_SYMBOL(cuEventDestroy, 4000, cuEventDestroy_v2),
    FAKE_SYMBOL(cuEventRecord, 2000, cuEventRecord),
    FAKE_SYMBOL(cuEventQuery, 2000, cuEventQuery),
    FAKE_SYMBOL(cuEventSynchronize, 2000, cuEventSynchronize),
    FAKE_OLD(cuMemHostRegister, 4000),
    FAKE_SYMBOL(cuMemHostRegister, 6050, cuMemHostRegister_v2),
    FAKE_SYMBOL(cuMemHostUnregister, 4000, cuMemHostUnregister),
    FAKE_SYMBOL(cuMemHostAlloc, 2020, cuMemHostAlloc),
    FAKE_SYMBOL(cuMemFreeHost, 2000, cuMemFreeHost),
    FAKE_OLD(cuMemcpyHtoDAsync, 2000),
    FAKE_SYMBOL(cuMemcpyHtoDAsync, 3020, cuMemcpyHtoDAsync_v2),
    FAKE_OLD(cuMemcpyDtoHAsync, 2000),
    FAKE_SYMBOL(cuMemcpyDtoHAsync, 3020, cuMemcpyDtoHAsync_v2),
    FAKE_SYMBOL(cuMemcpyBatchAsync, 12080, cuMemcpyBatchAsync_v12080),
    FAKE_SYMBOL(cuMemcpyBatchAsync, 13000, cuMemcpyBatchAsync_v13000),
    FAKE_SYMBOL(cuMemsetD8Async, 3020, cuMemsetD8Async),
    FAKE_SYMBOL(cuModuleLoadData, 2000, cuModuleLoadData),
    FAKE_SYMBOL(cuModuleGetFunction, 2000, cuModuleGetFunction),
    FAKE_SYMBOL(cuModuleUnload, 2000, cuModuleUnload),
    FAKE_SYMBOL(cuLaunchKernel, 4000, cuLaunchKernel),
    FAKE_OLD(cuMemAlloc, 2000),
    FAKE_SYMBOL(cuMemAlloc, 3020, cuMemAlloc_v2),
    FAKE_OLD(cuMemFree, 2000),
    FAKE_SYMBOL(cuMemFree, 3020, cuMemFree_v2),
};

// The newest function of that name which is no newer than the version asked for.
CUresult look_up(const char* name, void** function, int version) {
  *function = nullptr;
  if (version > model().version) return kInvalidValue;
  for (const Symbol& symbol : kSymbols)
    if (std::strcmp(symbol.name, name) == 0 && symbol.version <= version)
      *function = symbol.function;
  return 0;
}

}  // namespace

API CUresult cuGetProcAddress(const char* name, void** function, int version, uint64_t) {
  const CUresult result = look_up(name, function, version);
  return result == 0 && !*function ? kNotFound : result;
}

#ifndef FAKE_CUDA_BEFORE_12
API CUresult cuGetProcAddress_v2(const char* name, void** function, int version, uint64_t,
                                 int* status) {
  const CUresult result = look_up(name, function, version);
  if (status) *status = *function ? 0 : 1;
  return result;
}
#endif

}  // namespace fake_cuda
