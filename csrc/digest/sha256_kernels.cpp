#include "digest/sha256_kernels.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <ctime>
#include <functional>
#include <limits>
#include <memory>
#include <new>

namespace tensorizer::digest {
namespace {

void openssl_one(const BlockRun* runs, size_t, size_t nblocks) noexcept {
  openssl_absorb(runs[0].state, runs[0].data, nblocks);
}

void sha_instructions_one(const BlockRun* runs, size_t, size_t nblocks) noexcept {
  sha_instructions_absorb(runs[0].state, runs[0].data, nblocks);
}

void sha_instructions_two(const BlockRun* runs, size_t, size_t nblocks) noexcept {
  sha_instructions_absorb_pair(runs[0].state, runs[0].data, runs[1].state, runs[1].data, nblocks);
}

bool has_both() noexcept { return sha_lanes_supported() && sha_instructions_supported(); }
bool has_nothing_special() noexcept { return true; }

// Where to change over on Sapphire Rapids. A byte takes, in cycles of the time stamp counter: one
// message at a time 1.65 with SHA-NI (OpenSSL without it: four times that), a pair 1.4, eight full
// lanes 1.0, sixteen 0.77. On Zen 4 a pair is faster than any lanes.
constexpr Sha256Kernel::Width kBothWidths[] = {{11, 16, &sha_absorb_16},
                                               {6, 8, &sha_absorb_8},
                                               {2, 2, &sha_instructions_two},
                                               {1, 1, &sha_instructions_one}};
constexpr Sha256Kernel::Width kLanesWidths[] = {
    {9, 16, &sha_absorb_16}, {2, 8, &sha_absorb_8}, {1, 1, &openssl_one}};
constexpr Sha256Kernel::Width kShaInstructionsWidths[] = {{2, 2, &sha_instructions_two},
                                                          {1, 1, &sha_instructions_one}};
constexpr Sha256Kernel::Width kOpensslWidths[] = {{1, 1, &openssl_one}};

#if defined(__aarch64__)
constexpr const char* kShaInstructions = "armv8-sha2";
#else
constexpr const char* kShaInstructions = "sha-ni";
#endif

constexpr Sha256Kernel kKernels[] = {
    {"avx512+sha-ni", &has_both, kBothWidths},
    {kShaInstructions, &sha_instructions_supported, kShaInstructionsWidths},
    {"avx512", &sha_lanes_supported, kLanesWidths},
    {"openssl", &has_nothing_special, kOpensslWidths}};

// Time of this thread for a byte of `messages` messages, each of its own 4 KiB of `bytes`; the best
// of several, since the first of them warms up and others may be interrupted.
double time_of(const Sha256Kernel::Width& width, std::span<const std::byte> bytes) noexcept {
  constexpr size_t kMessageNbytes = 4096;
  constexpr int kRounds = 6;
  std::array<std::array<uint32_t, 8>, kMostLanes> states{};
  std::array<BlockRun, kMostLanes> runs;
  constexpr size_t kBlocks = kMessageNbytes / kSha256BlockNbytes;
  for (size_t i = 0; i < width.lanes; ++i)
    runs[i] = {states[i].data(), bytes.data() + i * kMessageNbytes, kBlocks};
  const auto now = [] {
    timespec time{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return static_cast<double>(time.tv_sec) * 1e9 + static_cast<double>(time.tv_nsec);
  };
  double best = std::numeric_limits<double>::infinity();
  for (int round = 0; round < kRounds; ++round) {
    const double begin = now();
    width.absorb(runs.data(), width.lanes, kBlocks);
    best = std::min(best, now() - begin);
  }
  return best / static_cast<double>(width.lanes * kMessageNbytes);
}

// The kernel with both ways, as it is fastest on this processor.
struct Measured {
  Sha256Kernel kernel = kKernels[0];
  std::vector<Sha256Kernel::Width> widths;

  explicit Measured(std::span<const std::byte> bytes)
      : widths(widths_for({.pair = time_of(kBothWidths[2], bytes),
                           .eight = time_of(kBothWidths[1], bytes),
                           .sixteen = time_of(kBothWidths[0], bytes)})) {
    kernel.widths = widths;
  }
};

}  // namespace

const Sha256Kernel::Width& Sha256Kernel::width_for(size_t messages) const noexcept {
  for (const Width& width : widths)
    if (messages >= width.from) return width;
  return widths.back();
}

std::span<const Sha256Kernel> compiled_sha256_kernels() noexcept { return kKernels; }

std::vector<Sha256Kernel::Width> widths_for(const Sha256Times& times) {
  using Width = Sha256Kernel::Width;
  std::vector<Width> widths = {kBothWidths[3], kBothWidths[2]};
  const auto by_pairs = [&](size_t messages) { return static_cast<double>(messages) * times.pair; };
  size_t eight_from = 3;  // lanes without a message cost as much as others
  while (eight_from <= 8 && 8 * times.eight >= by_pairs(eight_from)) ++eight_from;
  const bool has_eight = eight_from <= 8;
  if (has_eight) widths.push_back({eight_from, 8, kBothWidths[1].absorb});
  const auto without_sixteen = [&](size_t messages) {
    if (!has_eight || messages < eight_from) return by_pairs(messages);
    return 8 * times.eight + by_pairs(messages - std::min<size_t>(messages, 8));
  };
  size_t sixteen_from = has_eight ? eight_from + 1 : 3;
  while (sixteen_from <= 16 && 16 * times.sixteen >= without_sixteen(sixteen_from)) ++sixteen_from;
  if (sixteen_from <= 16) widths.push_back({sixteen_from, 16, kBothWidths[0].absorb});
  std::ranges::reverse(widths);
  return widths;
}

// Without a lock, which a forked child could find taken: threads that come first may each measure.
const Sha256Kernel& sha256_kernel_here() noexcept {
  static constinit std::atomic<const Sha256Kernel*> chosen{nullptr};
  if (const Sha256Kernel* const here = chosen.load(std::memory_order_acquire)) return *here;
  const Sha256Kernel* here =
      std::ranges::find_if(kKernels, [](const Sha256Kernel& kernel) { return kernel.usable(); });
  std::unique_ptr<Measured> measured;
  if (here == &kKernels[0]) {
    try {
      measured = std::make_unique<Measured>(std::vector<std::byte>(size_t{64} << 10));
      here = &measured->kernel;
    } catch (const std::bad_alloc&) {  // no memory: as on most processors
    }
  }
  const Sha256Kernel* others = nullptr;
  if (!chosen.compare_exchange_strong(others, here, std::memory_order_acq_rel)) return *others;
  static_cast<void>(measured.release());  // never destroyed
  return *here;
}

void absorb_all(const Sha256Kernel& kernel, std::span<BlockRun> runs) noexcept {
  // The longest first: when no message is left for a free lane, those under way end soon.
  std::ranges::sort(runs, std::greater<>{}, &BlockRun::nblocks);
  std::array<BlockRun, kMostLanes> open;
  size_t count = 0;
  for (size_t next = 0;;) {
    while (count < kernel.widths.front().lanes && next < runs.size()) open[count++] = runs[next++];
    if (count == 0) return;
    const Sha256Kernel::Width& width = kernel.width_for(count);
    const std::span<BlockRun> taken(open.data(), std::min(count, width.lanes));
    const size_t nblocks = std::ranges::min_element(taken, {}, &BlockRun::nblocks)->nblocks;
    if (nblocks > 0) width.absorb(taken.data(), taken.size(), nblocks);
    for (BlockRun& run : taken) {
      run.data += nblocks * kSha256BlockNbytes;
      run.nblocks -= nblocks;
    }
    const auto end = std::remove_if(open.begin(), open.begin() + static_cast<std::ptrdiff_t>(count),
                                    [](const BlockRun& run) { return run.nblocks == 0; });
    count = static_cast<size_t>(end - open.begin());
  }
}

}  // namespace tensorizer::digest
