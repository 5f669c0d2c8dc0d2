#include "crypto/kernels/box_kernel.h"

#include "crypto/kernels/vector_kernels.h"

namespace tensorizer::crypto {

std::span<const BoxKernel* const> compiled_kernels() noexcept {
  static constexpr const BoxKernel* kKernels[] = {
#if defined(__x86_64__)
      &kAvx512IfmaKernel, &kAvx512Kernel, &kAvx2Kernel,
#endif
      &kLibsodiumKernel};
  return kKernels;
}

}  // namespace tensorizer::crypto
