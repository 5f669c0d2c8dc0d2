#include "device/cuda/kernels/embedded.h"

namespace tensorizer::device::cuda {
namespace {

#if __has_include("tensorizer_kernels.inc")
// Written by the build where nvcc is present: the bytes of the fat binary, separated by commas.
alignas(64) constexpr unsigned char kKernels[] = {
#include "tensorizer_kernels.inc"
};
#endif

}  // namespace

std::span<const unsigned char> embedded_kernels() noexcept {
#if __has_include("tensorizer_kernels.inc")
  return kKernels;
#else
  return {};
#endif
}

}  // namespace tensorizer::device::cuda
