#include "crypto/kernels/box_kernel.h"

namespace tensorizer::crypto {

std::span<const BoxKernel* const> compiled_kernels() noexcept {
  static constexpr const BoxKernel* kKernels[] = {&kLibsodiumKernel};
  return kKernels;
}

}  // namespace tensorizer::crypto
