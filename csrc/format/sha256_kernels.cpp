#include "format/sha256_kernels.h"

#include <algorithm>
#include <array>
#include <functional>

namespace tensorizer::format {
namespace {

void openssl_one(const BlockRun* runs, size_t, size_t nblocks) noexcept {
  openssl_absorb(runs[0].state, runs[0].data, nblocks);
}

void sha_ni_one(const BlockRun* runs, size_t, size_t nblocks) noexcept {
  sha_ni_absorb(runs[0].state, runs[0].data, nblocks);
}

void sha_ni_two(const BlockRun* runs, size_t, size_t nblocks) noexcept {
  sha_ni_absorb_pair(runs[0].state, runs[0].data, runs[1].state, runs[1].data, nblocks);
}

bool has_both() noexcept { return sha_lanes_supported() && sha_ni_supported(); }
bool has_nothing_special() noexcept { return true; }

// Where to change over, from the time for a byte on Sapphire Rapids, in cycles of the time stamp
// counter: one message at a time 1.65 with SHA-NI (OpenSSL without it: four times that), a
// pair 1.4, eight full lanes 1.0, sixteen 0.77.
constexpr Sha256Kernel::Width kBothWidths[] = {
    {11, 16, &sha_absorb_16}, {6, 8, &sha_absorb_8}, {2, 2, &sha_ni_two}, {1, 1, &sha_ni_one}};
constexpr Sha256Kernel::Width kLanesWidths[] = {
    {9, 16, &sha_absorb_16}, {2, 8, &sha_absorb_8}, {1, 1, &openssl_one}};
constexpr Sha256Kernel::Width kShaNiWidths[] = {{2, 2, &sha_ni_two}, {1, 1, &sha_ni_one}};
constexpr Sha256Kernel::Width kOpensslWidths[] = {{1, 1, &openssl_one}};

constexpr Sha256Kernel kKernels[] = {{"avx512+sha-ni", &has_both, kBothWidths},
                                     {"sha-ni", &sha_ni_supported, kShaNiWidths},
                                     {"avx512", &sha_lanes_supported, kLanesWidths},
                                     {"openssl", &has_nothing_special, kOpensslWidths}};

}  // namespace

const Sha256Kernel::Width& Sha256Kernel::width_for(size_t messages) const noexcept {
  for (const Width& width : widths)
    if (messages >= width.from) return width;
  return widths.back();
}

std::span<const Sha256Kernel> compiled_sha256_kernels() noexcept { return kKernels; }

const Sha256Kernel& sha256_kernel_here() noexcept {
  static const Sha256Kernel& found =
      *std::ranges::find_if(kKernels, [](const Sha256Kernel& kernel) { return kernel.usable(); });
  return found;
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

}  // namespace tensorizer::format
