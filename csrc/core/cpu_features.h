// Which vector instructions the processor has and the operating system keeps the registers of.
// Asked of the processor itself: __builtin_cpu_supports leaves that to the compiler's run-time
// library, and in that of zig, which wheels are built with, the answer is always no.
#pragma once

namespace tensorizer {

struct CpuFeatures {
  bool avx = false;
  bool avx2 = false;
  bool avx512f = false;
  bool avx512bw = false;
  bool avx512dq = false;
  bool avx512vl = false;
  bool avx512ifma = false;
  bool avx512vbmi2 = false;
};

// All false on other architectures than x86-64.
const CpuFeatures& cpu_features() noexcept;

}  // namespace tensorizer
