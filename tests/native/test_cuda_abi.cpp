// The declarations in driver.h are those of cuda.h, where a CUDA toolkit is installed to compare
// with.
#if __has_include(<cuda.h>) && __has_include(<cudaTypedefs.h>)
#include <cuda.h>
#include <cudaTypedefs.h>
#include <gtest/gtest.h>

#include <type_traits>

#include "device/cuda/driver.h"

namespace tensorizer::device::cuda {
namespace {

static_assert(sizeof(CUresult) == sizeof(Result) && sizeof(CUdevice) == sizeof(Ordinal));
static_assert(std::is_same_v<CUdeviceptr, DevicePointer>);
static_assert(sizeof(CUstream) == sizeof(Stream) && sizeof(CUcontext) == sizeof(Context));
static_assert(sizeof(CUmemcpyAttributes_v1) == sizeof(CopyAttributes));
static_assert(offsetof(CUmemcpyAttributes_v1, srcLocHint) == offsetof(CopyAttributes, source_hint));
static_assert(offsetof(CUmemcpyAttributes_v1, dstLocHint) ==
              offsetof(CopyAttributes, destination_hint));
static_assert(offsetof(CUmemcpyAttributes_v1, flags) == offsetof(CopyAttributes, flags));

// The driver's function pointer type and ours have as many parameters, of the same sizes.
template <class Theirs, class Ours>
struct SameShape : std::false_type {};
template <class R1, class... A1, class R2, class... A2>
struct SameShape<R1 (*)(A1...), R2 (*)(A2...)> {
  static constexpr bool value = [] {
    if constexpr (sizeof...(A1) != sizeof...(A2)) {
      return false;
    } else {
      return sizeof(R1) == sizeof(R2) &&
             ((sizeof(A1) == sizeof(A2) && std::is_pointer_v<A1> == std::is_pointer_v<A2>) && ...);
    }
  }();
};

#define EXPECT_SAME_SHAPE(name, version, parameters) \
  static_assert(SameShape<PFN_##name##_v##version, decltype(Driver::name)>::value, #name);
TENSORIZER_CUDA_REQUIRED(EXPECT_SAME_SHAPE)
TENSORIZER_CUDA_OPTIONAL(EXPECT_SAME_SHAPE)

TEST(CudaAbi, NumbersAreThoseOfTheToolkit) {
  EXPECT_EQ(kSuccess, CUDA_SUCCESS);
  EXPECT_EQ(kInvalidValue, CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(kOutOfMemory, CUDA_ERROR_OUT_OF_MEMORY);
  EXPECT_EQ(kNotReady, CUDA_ERROR_NOT_READY);
  EXPECT_EQ(kNotSupported, CUDA_ERROR_NOT_SUPPORTED);
  EXPECT_EQ(kStreamNonBlocking, static_cast<unsigned>(CU_STREAM_NON_BLOCKING));
  EXPECT_EQ(kEventBlockingSync, static_cast<unsigned>(CU_EVENT_BLOCKING_SYNC));
  EXPECT_EQ(kEventDisableTiming, static_cast<unsigned>(CU_EVENT_DISABLE_TIMING));
  EXPECT_EQ(kHostRegisterPortable, static_cast<unsigned>(CU_MEMHOSTREGISTER_PORTABLE));
  EXPECT_EQ(kHostAllocPortable, static_cast<unsigned>(CU_MEMHOSTALLOC_PORTABLE));
  EXPECT_EQ(kAttributeIntegrated, CU_DEVICE_ATTRIBUTE_INTEGRATED);
  EXPECT_EQ(kAttributeHostRegisterSupported, CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED);
  EXPECT_EQ(kAttributeUsesHostPageTables,
            CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES);
  EXPECT_EQ(kCaptureStatusNone, CU_STREAM_CAPTURE_STATUS_NONE);
  EXPECT_EQ(kCaptureModeRelaxed, CU_STREAM_CAPTURE_MODE_RELAXED);
  EXPECT_EQ(kSourceAccessInStreamOrder, CU_MEMCPY_SRC_ACCESS_ORDER_STREAM);
}

}  // namespace
}  // namespace tensorizer::device::cuda
#endif
