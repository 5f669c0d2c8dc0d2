#include "sync/element_sum.h"

#include <algorithm>

#include "core/checked_math.h"
#include "sync/pieces.h"

namespace tensorizer::sync {
namespace {

constexpr uint64_t kSummedAtOnce = uint64_t{1} << 20;  // elements

template <size_t kItemsize>
uint64_t sum_of_elements(const Elements& tensor, uint64_t begin, uint64_t end) noexcept {
  uint64_t sum = 0;
  for (uint64_t i = begin; i < end; ++i)
    sum += mixed(mixed_number(tensor.first + i),
                 Element<kItemsize>(tensor.bytes.data() + i * kItemsize));
  return sum;
}

}  // namespace

std::vector<uint64_t> element_sums(std::span<const Elements> tensors, unsigned workers,
                                   const std::stop_token& stop) {
  const auto count = [&](size_t i) { return tensors[i].bytes.size() / tensors[i].itemsize; };
  const std::vector<PieceOf> pieces =
      all_pieces(tensors.size(), [&](size_t i) { return ceil_div(count(i), kSummedAtOnce); });
  std::vector<uint64_t> found(pieces.size());
  for_pieces(pieces, workers, stop, [&](const PieceOf& at, size_t i) {
    const uint64_t begin = at.piece * kSummedAtOnce;
    const uint64_t end = std::min(count(at.tensor), begin + kSummedAtOnce);
    found[i] = with_itemsize(tensors[at.tensor].itemsize, [&]<size_t kItemsize>() {
      return sum_of_elements<kItemsize>(tensors[at.tensor], begin, end);
    });
  });
  std::vector<uint64_t> sums(tensors.size());
  for (size_t i = 0; i < pieces.size(); ++i) sums[pieces[i].tensor] += found[i];
  return sums;
}

}  // namespace tensorizer::sync
