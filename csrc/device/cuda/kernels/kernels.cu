// The kernels' entries. Compiled by scripts/kernels.py to kernels.ptx, which is committed; a build
// of the extension does not read this file.
#include "device/cuda/kernels/secretbox.h"

namespace cuda = tensorizer::device::cuda;
using tensorizer::device::ChunkToOpen;

extern "C" __global__ void __launch_bounds__(cuda::kThreads)
    tz_mac(const ChunkToOpen* chunks, const uint32_t* chunk_of, uint32_t* partial) {
  __shared__ cuda::MacShared shared;
  cuda::DeviceBlock block;
  cuda::mac_kernel(block, shared, chunks, chunk_of, partial);
}

extern "C" __global__ void __launch_bounds__(cuda::kThreads)
    tz_open(const ChunkToOpen* chunks, const uint32_t* chunk_of, const uint32_t* partial,
            uint32_t* verdict) {
  __shared__ cuda::OpenShared shared;
  cuda::DeviceBlock block;
  cuda::open_kernel(block, shared, chunks, chunk_of, partial, verdict);
}
