// Input: the size of elements, how many a tensor has, then positions; values follow from these.
// What is accepted must be ascending numbers below the count, and the shortest form of them.
#include <algorithm>
#include <vector>

#include "core/error.h"
#include "fuzz_check.h"
#include "sync/delta.h"
#include "sync/leb128.h"

using namespace tensorizer;
using namespace tensorizer::sync;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  auto input = tensorizer::testing::fuzz_bytes(data, size);
  constexpr size_t kItemsizes[] = {1, 2, 4, 8, 16};
  const size_t itemsize = kItemsizes[tensorizer::testing::take_integer<uint8_t>(input) % 5];
  const auto count = tensorizer::testing::take_integer<uint64_t>(input);
  size_t ends = 0;  // of numbers, if these are any
  for (const std::byte byte : input) ends += (byte & std::byte{0x80}) == std::byte{0};
  const std::vector<std::byte> values(ends * itemsize, std::byte{1});
  try {
    const CheckedDelta delta({input, values, count, itemsize, "w"});
    FUZZ_CHECK(delta.changed() == ends);
    std::vector<int64_t> numbers(ends);
    decode(delta, 0, numbers);
    std::vector<std::byte> again;
    uint64_t next = 0;
    for (const int64_t number : numbers) {
      const auto position = static_cast<uint64_t>(number);
      FUZZ_CHECK(position >= next && position < count);
      std::byte gap[kMaxLeb128];
      again.insert(again.end(), gap, put_leb128(gap, position - next));
      next = position + 1;
    }
    FUZZ_CHECK(std::equal(again.begin(), again.end(), input.begin(), input.end()));
    const CheckedDelta* const both[] = {&delta, &delta};
    if (count < (uint64_t{1} << 20)) {
      const Delta once = merged(both, 2, {});
      FUZZ_CHECK(std::ranges::equal(once.positions, again));
      FUZZ_CHECK(std::ranges::equal(once.values, values));
      std::vector<std::byte> tensor(count * itemsize);
      const Change change{{tensor, itemsize}, &delta};
      write({&change, 1}, 2, {});
      FUZZ_CHECK(sum_changes({&change, 1}, 2, {})[0] == 0);
    }
  } catch (const Error& error) {
    FUZZ_CHECK(error.code() == Errc::malformed);
  }
  return 0;
}
