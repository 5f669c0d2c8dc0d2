#include "core/cpu_features.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace tensorizer {
namespace {

#if defined(__x86_64__)

// Intel's manual, volume 1, 13.3 and 14.3: bits of XCR0.
constexpr unsigned kYmmState = 0x06, kZmmState = 0xe6;

unsigned saved_registers() noexcept {
  unsigned low = 0, high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low;
}

CpuFeatures ask() noexcept {
  CpuFeatures found;
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  constexpr unsigned kXgetbvBit = 1u << 27, kAvxBit = 1u << 28;
  if (__get_cpuid(1, &eax, &ebx, &ecx, &edx) == 0 || (ecx & kXgetbvBit) == 0) return found;
  const unsigned saved = saved_registers();
  if ((saved & kYmmState) != kYmmState) return found;
  found.avx = (ecx & kAvxBit) != 0;
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return found;
  const auto has = [ebx](unsigned bit) { return ((ebx >> bit) & 1) != 0; };
  found.avx2 = has(5);
  if ((saved & kZmmState) != kZmmState) return found;
  found.avx512f = has(16);
  found.avx512bw = has(30);
  found.avx512dq = has(17);
  found.avx512vl = has(31);
  found.avx512ifma = has(21);
  found.avx512vbmi2 = ((ecx >> 6) & 1) != 0;
  return found;
}

#else

CpuFeatures ask() noexcept { return {}; }

#endif

}  // namespace

const CpuFeatures& cpu_features() noexcept {
  static const CpuFeatures found = ask();
  return found;
}

}  // namespace tensorizer
