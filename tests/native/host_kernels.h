// The device's kernels on the host: the same source, with a loop over the threads of a thread
// block. Deterministic; sanitizers see every access. It ends the process where a kernel breaks one
// of its own rules: two phases without a sync between them, a sum above its bound.
#pragma once

#include <cstdint>

extern "C" {

enum host_thread_order { HOST_FORWARD = 0, HOST_BACKWARD = 1, HOST_SHUFFLED = 2 };

// Runs a kernel by the name and the parameters that cuLaunchKernel() is given, with `blocks` thread
// blocks in shuffled order. 0: done. 1: no kernel of that name. 2: it left something in the shared
// memory that it wipes at its end.
int host_kernel_run(const char* name, uint32_t blocks, void** parameters, int thread_order,
                    uint64_t seed);

// What the kernels' arithmetic gives for single values, for comparison with a reference.
void host_kernel_multiply(const uint32_t* a, const uint32_t* b, uint32_t* product);
void host_kernel_reduce(const uint32_t* limbs, uint32_t* reduced);
}
