// The compiled kernels, as the build embedded them.
#pragma once

#include <cstddef>
#include <span>

namespace tensorizer::device::cuda {

// A fat binary for cuModuleLoadData; empty where the build had no nvcc.
std::span<const unsigned char> embedded_kernels() noexcept;

}  // namespace tensorizer::device::cuda
