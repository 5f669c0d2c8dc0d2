// The CUDA driver, looked up at run time: one build serves hosts with and without a GPU, and every
// driver since 11.3, the first that hands out its functions by version.
//
// Nothing here links against CUDA or needs its headers: the few types and functions are declared
// below as the driver API documents them (tests/native/test_cuda_abi.cpp compares them with cuda.h
// where that is installed). Each function is asked for with the version of the API whose signature
// is written here, so a newer driver hands out the same one. The library is never closed: other
// parts of the process hold handles into it until the very end.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "core/error.h"

namespace tensorizer::device::cuda {

using Result = int;  // CUresult
using Ordinal = int;
using DevicePointer = unsigned long long;
using Context = struct ContextTag*;
using Stream = struct StreamTag*;
using Event = struct EventTag*;
using Module = struct ModuleTag*;
using Function = struct FunctionTag*;

inline constexpr Result kSuccess = 0;
inline constexpr Result kInvalidValue = 1;
inline constexpr Result kOutOfMemory = 2;
inline constexpr Result kNotReady = 600;
inline constexpr Result kNotSupported = 801;

inline constexpr unsigned kStreamNonBlocking = 1;
inline constexpr unsigned kEventBlockingSync = 1;
inline constexpr unsigned kEventDisableTiming = 2;
inline constexpr unsigned kHostRegisterPortable = 1;
inline constexpr unsigned kHostAllocPortable = 1;
inline constexpr int kAttributeIntegrated = 18;
inline constexpr int kAttributeHostRegisterSupported = 99;
inline constexpr int kAttributeUsesHostPageTables = 100;
inline constexpr int kCaptureStatusNone = 0;
inline constexpr int kCaptureModeRelaxed = 2;

// CUmemcpyAttributes: how one copy of a batch reads its source.
struct MemoryLocation {
  int type = 0;
  int id = 0;
};
struct CopyAttributes {
  int source_access_order = 0;
  MemoryLocation source_hint;
  MemoryLocation destination_hint;
  unsigned flags = 0;
};
inline constexpr int kSourceAccessInStreamOrder = 1;

// X(name, version of the API that has this signature, parameters)
#define TENSORIZER_CUDA_REQUIRED(X)                                                \
  X(cuInit, 2000, (unsigned flags))                                                \
  X(cuGetErrorName, 6000, (Result error, const char** name))                       \
  X(cuGetErrorString, 6000, (Result error, const char** text))                     \
  X(cuDeviceGetCount, 2000, (int* count))                                          \
  X(cuDeviceGet, 2000, (Ordinal * device, int ordinal))                            \
  X(cuDeviceGetAttribute, 2000, (int* value, int attribute, Ordinal device))       \
  X(cuDeviceGetPCIBusId, 4010, (char* text, int nbytes, Ordinal device))           \
  X(cuDevicePrimaryCtxRetain, 7000, (Context * context, Ordinal device))           \
  X(cuDevicePrimaryCtxRelease, 11000, (Ordinal device))                            \
  X(cuCtxPushCurrent, 4000, (Context context))                                     \
  X(cuCtxPopCurrent, 4000, (Context * context))                                    \
  X(cuThreadExchangeStreamCaptureMode, 10010, (int* mode))                         \
  X(cuStreamCreate, 2000, (Stream * stream, unsigned flags))                       \
  X(cuStreamDestroy, 4000, (Stream stream))                                        \
  X(cuStreamSynchronize, 2000, (Stream stream))                                    \
  X(cuStreamWaitEvent, 3020, (Stream stream, Event event, unsigned flags))         \
  X(cuStreamIsCapturing, 10000, (Stream stream, int* status))                      \
  X(cuEventCreate, 2000, (Event * event, unsigned flags))                          \
  X(cuEventDestroy, 4000, (Event event))                                           \
  X(cuEventRecord, 2000, (Event event, Stream stream))                             \
  X(cuEventQuery, 2000, (Event event))                                             \
  X(cuMemHostRegister, 6050, (void* address, size_t nbytes, unsigned flags))       \
  X(cuMemHostUnregister, 4000, (void* address))                                    \
  X(cuMemHostAlloc, 2020, (void** address, size_t nbytes, unsigned flags))         \
  X(cuMemFreeHost, 2000, (void* address))                                          \
  X(cuMemcpyHtoDAsync, 3020,                                                       \
    (DevicePointer destination, const void* source, size_t nbytes, Stream stream)) \
  X(cuMemcpyDtoHAsync, 3020,                                                       \
    (void* destination, DevicePointer source, size_t nbytes, Stream stream))       \
  X(cuMemsetD8Async, 3020,                                                         \
    (DevicePointer destination, unsigned char value, size_t nbytes, Stream stream))

#define TENSORIZER_CUDA_OPTIONAL(X)                                                      \
  X(cuMemcpyBatchAsync, 12080,                                                           \
    (DevicePointer * destinations, DevicePointer * sources, size_t* sizes, size_t count, \
     CopyAttributes* attributes, size_t* attribute_starts, size_t attribute_count,       \
     size_t* failed_index, Stream stream))                                               \
  X(cuModuleLoadData, 2000, (Module * module, const void* image))                        \
  X(cuModuleGetFunction, 2000, (Function * function, Module module, const char* name))   \
  X(cuModuleUnload, 2000, (Module module))                                               \
  X(cuLaunchKernel, 4000,                                                                \
    (Function function, unsigned blocks_x, unsigned blocks_y, unsigned blocks_z,         \
     unsigned threads_x, unsigned threads_y, unsigned threads_z, unsigned shared_nbytes, \
     Stream stream, void** parameters, void** extra))                                    \
  X(cuMemAlloc, 3020, (DevicePointer * address, size_t nbytes))                          \
  X(cuMemFree, 3020, (DevicePointer address))

struct Driver {
  int version = 0;  // 1000 * major + 10 * minor
#define TENSORIZER_CUDA_MEMBER(name, api_version, parameters) Result(*name) parameters = nullptr;
  TENSORIZER_CUDA_REQUIRED(TENSORIZER_CUDA_MEMBER)
  TENSORIZER_CUDA_OPTIONAL(TENSORIZER_CUDA_MEMBER)  // nullptr where the driver is older
#undef TENSORIZER_CUDA_MEMBER
};

// The driver, opened and initialised by the first call. Safe from any thread.
// Throws Error(device): no driver, one that is too old, no usable device, or a child forked after
// CUDA was in use.
const Driver& driver();

// True where this very process (not a parent it was forked from) has initialised the driver.
bool driver_is_in_use() noexcept;

// True where the driver library opens and has what we need. Does not initialise CUDA: forking stays
// possible. Throws as driver() in a child that was forked from a process that uses CUDA.
bool driver_is_present();

// Where the driver is looked for, "libcuda.so.1" until somebody says otherwise.
// Throws Error(invalid_argument) once a driver from elsewhere is in use.
void set_driver_library(const std::string& path);

// "<driver's name> (<number>): <its text>".
std::string describe(const Driver& driver, Result result);

// Error(device), or Error(out_of_memory) for that code: "<action>: <driver's name and text>".
[[noreturn]] void throw_cuda_error(const Driver& driver, Result result, const std::string& action);

inline void check(const Driver& driver, Result result, const char* action) {
  if (result != kSuccess) throw_cuda_error(driver, result, action);
}

}  // namespace tensorizer::device::cuda
