// The kernels of our own for x86-64, in the order in which they are preferred. Private to
// csrc/crypto.
#pragma once

#include "crypto/kernels/box_kernel.h"

#if defined(__x86_64__)
namespace tensorizer::crypto {

extern const BoxKernel
    kAvx512IfmaKernel;  // Salsa20 on 16 blocks, Poly1305 with 52-bit multiply-add
extern const BoxKernel
    kAvx512Kernel;  // the same without IFMA (Skylake-X, Cascade Lake): Poly1305 as AVX2
extern const BoxKernel kAvx2Kernel;  // Salsa20 on 8 blocks, Poly1305 with 32-bit multiplication

}  // namespace tensorizer::crypto
#endif
