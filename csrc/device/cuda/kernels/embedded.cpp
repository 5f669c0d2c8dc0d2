#include "device/cuda/kernels/embedded.h"

namespace tensorizer::device::cuda {
namespace {

// Written by compile_kernels.py: the numbers of a fat binary, each with a comma after it; empty
// without nvcc.
alignas(64) constexpr unsigned char kKernels[] = {
#if __has_include("tensorizer_kernels.inc")
#include "tensorizer_kernels.inc"
#endif
    0  // an array must have something in it
};

}  // namespace

std::span<const unsigned char> embedded_kernels() noexcept {
  return std::span(kKernels).first<sizeof kKernels - 1>();
}

}  // namespace tensorizer::device::cuda
