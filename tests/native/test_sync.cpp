// What changed between two copies of a tensor, found, merged and written, against twins of a few
// lines.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "core/error.h"
#include "sync/delta.h"
#include "sync/element_kernels.h"
#include "sync/element_sum.h"
#include "sync/leb128.h"

namespace tensorizer::sync {
namespace {

using Vector = std::vector<std::byte>;

Vector bytes_of(std::initializer_list<int> values) {
  Vector made;
  for (const int value : values) made.push_back(static_cast<std::byte>(value));
  return made;
}

UnwrittenBytes stored(std::initializer_list<int> values) {
  const Vector made = bytes_of(values);
  return {made.begin(), made.end()};
}

class Random {
 public:
  explicit Random(uint32_t seed) : engine_(seed) {}
  uint64_t below(uint64_t n) { return std::uniform_int_distribution<uint64_t>(0, n - 1)(engine_); }
  Vector bytes(size_t n) {
    Vector made(n);
    for (std::byte& byte : made) byte = static_cast<std::byte>(below(256));
    return made;
  }

 private:
  std::mt19937_64 engine_;
};

// The definition, word for word.
uint64_t plain_sum(const Vector& tensor, size_t itemsize) {
  const auto fmix = [](uint64_t x) {
    x ^= x >> 33;
    x *= 0xFF51AFD7ED558CCDu;
    x ^= x >> 33;
    x *= 0xC4CEB9FE1A85EC53u;
    x ^= x >> 33;
    return x;
  };
  uint64_t sum = 0;
  for (size_t i = 0; i < tensor.size() / itemsize; ++i) {
    uint64_t h = fmix(i + 0x9E3779B97F4A7C15u);
    for (size_t at = 0; at < itemsize; at += 8) {
      uint64_t word = 0;
      for (size_t k = at; k < std::min(at + 8, itemsize); ++k)
        word |= static_cast<uint64_t>(tensor[i * itemsize + k]) << (8 * (k - at));
      h = fmix(h ^ word);
    }
    sum += h;
  }
  return sum;
}

Delta plain_delta(const std::map<uint64_t, Vector>& changes) {
  Delta delta;
  uint64_t next = 0;
  for (const auto& [number, value] : changes) {
    for (uint64_t gap = number - next;; gap >>= 7) {
      delta.positions.push_back(static_cast<std::byte>((gap & 0x7F) | (gap > 0x7F ? 0x80 : 0)));
      if (gap <= 0x7F) break;
    }
    delta.values.insert(delta.values.end(), value.begin(), value.end());
    next = number + 1;
  }
  return delta;
}

CheckedDelta checked(const Delta& delta, uint64_t count, size_t itemsize) {
  return CheckedDelta({delta.positions, delta.values, count, itemsize, "w"});
}

uint64_t element_sum(const Vector& tensor, size_t itemsize) {
  const Elements elements{tensor, itemsize, 0};
  return element_sums({&elements, 1}, 3, {})[0];
}

std::string refusal(const Vector& positions, const Vector& values, uint64_t count) {
  try {
    CheckedDelta({positions, values, count, 1, "layer.weight"});
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Errc::malformed);
    return error.what();
  }
  return "";
}

TEST(Positions, ManyGapsAtATimeAreWhatTheyAreOneByOne) {
  Random random(7);
  size_t accepted = 0, refused = 0;
  for (int round = 0; round < 50'000; ++round) {
    constexpr uint64_t kGaps[] = {128, 16'384, 300, 100'000};
    Vector bytes = bytes_of({5});
    while (bytes.size() < 90) {
      std::array<std::byte, kMaxLeb128> gap;
      const uint64_t most = kGaps[random.below(20) == 0 ? 3 : static_cast<uint64_t>(round) % 3];
      bytes.insert(bytes.end(), gap.data(), put_leb128(gap.data(), random.below(most)));
    }
    if (round % 4 == 0)
      bytes[1 + random.below(70)] = random.below(2) == 0 ? std::byte{0} : std::byte{0x80};
    const std::byte *at = bytes.data() + 1, *const end = bytes.data() + bytes.size();
    const ShortGaps gaps = check_short_gaps(at, end);
    ++(gaps.count == 0 ? refused : accepted);
    uint64_t sum = 0;
    for (size_t i = 0; i < gaps.count; ++i) {
      uint64_t gap = 0;
      at = check_leb128(at, end, gap);
      ASSERT_NE(at, nullptr);
      sum += gap;
    }
    ASSERT_EQ(at, bytes.data() + 1 + gaps.nbytes);
    ASSERT_EQ(sum, gaps.sum);
  }
#if defined(__x86_64__)
  EXPECT_GT(accepted, 1000u);
#endif
  EXPECT_GT(refused, 1000u);
}

class EveryItemsize : public testing::TestWithParam<size_t> {};

TEST_P(EveryItemsize, ADifferenceTurnsTheOldCopyIntoTheNewOne) {
  const size_t itemsize = GetParam();
  Random random(static_cast<uint32_t>(itemsize));
  // The largest has pieces for several threads, the last one cut.
  const uint64_t large = (uint64_t{5} << 20) / itemsize + 3;
  for (const uint64_t count : {uint64_t{0}, uint64_t{1}, uint64_t{7}, uint64_t{3000}, large}) {
    for (const uint64_t one_in : {2, 100, 70'000}) {
      if (count == large && one_in == 2) continue;
      const Vector before = random.bytes(count * itemsize);
      Vector after = before;
      std::map<uint64_t, Vector> changes;
      for (uint64_t n = 0; n < count / one_in; ++n) {
        const uint64_t number = random.below(count);
        after[number * itemsize + random.below(itemsize)] ^= std::byte{4};
        changes[number] = {};
      }
      for (auto change = changes.begin(); change != changes.end();) {
        const auto at = after.begin() + static_cast<ptrdiff_t>(change->first * itemsize);
        change->second.assign(at, at + static_cast<ptrdiff_t>(itemsize));
        const auto was = before.begin() + static_cast<ptrdiff_t>(change->first * itemsize);
        const bool same = std::equal(change->second.begin(), change->second.end(), was);
        change = same ? changes.erase(change) : std::next(change);
      }
      const Delta expected = plain_delta(changes);
      Vector snapshot = before;
      const Copies copies{{snapshot, itemsize}, after};
      const Difference found = take_differences({&copies, 1}, 3, {})[0];
      EXPECT_EQ(snapshot, after);
      EXPECT_EQ(found.changed, changes.size());
      EXPECT_EQ(plain_sum(before, itemsize) + found.sum_change, plain_sum(after, itemsize));
      EXPECT_EQ(element_sum(after, itemsize), plain_sum(after, itemsize));
      const bool whole = expected.positions.size() + expected.values.size() > before.size();
      ASSERT_EQ(found.delta.has_value(), !whole);
      if (whole) continue;
      EXPECT_EQ(found.delta->positions, expected.positions);
      EXPECT_EQ(found.delta->values, expected.values);
      const CheckedDelta delta = checked(*found.delta, count, itemsize);
      EXPECT_EQ(delta.changed(), changes.size());
      std::vector<int64_t> numbers(changes.size());
      const size_t half = numbers.size() / 2;
      decode(delta, 0, std::span(numbers).first(half));
      decode(delta, half, std::span(numbers).subspan(half));
      EXPECT_EQ(sum_of(numbers, found.delta->values, itemsize), delta.sum_of_values());
      EXPECT_TRUE(std::equal(numbers.begin(), numbers.end(), changes.begin(), changes.end(),
                             [](int64_t number, const auto& change) {
                               return static_cast<uint64_t>(number) == change.first;
                             }));
      Vector target = before;
      const Change change{{target, itemsize}, &delta};
      EXPECT_EQ(sum_changes({&change, 1}, 3, {})[0], found.sum_change);
      for (int time = 0; time < 2; ++time) {
        write({&change, 1}, 3, {});
        EXPECT_EQ(target, after);
      }
      EXPECT_EQ(sum_changes({&change, 1}, 3, {})[0], 0u);
    }
  }
}

TEST_P(EveryItemsize, MergedDeltasHaveTheNewestValueOfEachElementOnce) {
  const size_t itemsize = GetParam();
  Random random(static_cast<uint32_t>(100 + itemsize));
  for (const uint64_t count : {1, 90, 40'000, 200'000}) {
    std::vector<Delta> stored;
    std::map<uint64_t, Vector> newest;
    for (int version = 0; version < 9; ++version) {
      std::map<uint64_t, Vector> changes;
      const uint64_t wanted = version == 4 ? 0 : random.below(count / 8 + 1);
      // Some crowd into one place, so that pieces of the positions are of very different lengths.
      const uint64_t room = version % 2 ? count : count / 10 + 1;
      for (uint64_t n = 0; n < wanted; ++n) changes[random.below(room)] = random.bytes(itemsize);
      for (const auto& [number, value] : changes) newest[number] = value;
      stored.push_back(plain_delta(changes));
    }
    std::vector<CheckedDelta> deltas;
    for (const Delta& delta : stored) deltas.push_back(checked(delta, count, itemsize));
    std::vector<const CheckedDelta*> oldest_first;
    for (const CheckedDelta& delta : deltas) oldest_first.push_back(&delta);
    const Delta one = merged(oldest_first, 3, {});
    const Delta expected = plain_delta(newest);
    EXPECT_EQ(one.positions, expected.positions);
    EXPECT_EQ(one.values, expected.values);
  }
}

TEST_P(EveryItemsize, DenseAndSparsePiecesOfOneTensorAreOneDelta) {
  const size_t itemsize = GetParam();
  Random random(static_cast<uint32_t>(200 + itemsize));
  const uint64_t count = (uint64_t{3} << 20) / itemsize;
  const Vector before = random.bytes(count * itemsize);
  Vector after = before;
  for (size_t i = 0; i < after.size() / 4; ++i) after[i] ^= std::byte{1};  // as long as itself
  after.back() ^= std::byte{1};
  Vector snapshot = before;
  const Copies copies{{snapshot, itemsize}, after};
  const Difference found = take_differences({&copies, 1}, 3, {})[0];
  EXPECT_EQ(found.changed, count / 4 + 1);
  EXPECT_EQ(snapshot, after);
  ASSERT_TRUE(found.delta.has_value());
  const CheckedDelta delta = checked(*found.delta, count, itemsize);
  Vector target = before;
  const Change change{{target, itemsize}, &delta};
  write({&change, 1}, 3, {});
  EXPECT_EQ(target, after);
}

TEST(Sync, ATensorThatChangedAsAWholeHasNoDelta) {
  for (const size_t nbytes : {size_t{1}, size_t{100}, size_t{2} << 20}) {
    Vector before(nbytes), after(nbytes, std::byte{1});
    const Copies copies{{before, 1}, after};
    const Difference found = take_differences({&copies, 1}, 3, {})[0];
    EXPECT_EQ(found.changed, nbytes);
    EXPECT_FALSE(found.delta.has_value());
    EXPECT_EQ(before, after);
    EXPECT_EQ(plain_sum(Vector(nbytes), 1) + found.sum_change, plain_sum(after, 1));
  }
}

TEST(Sync, ADeltaOfAsManyBytesAsTheTensorIsNotTheWholeTensor) {
  Vector before(4), after(4);
  after[0] = after[2] = std::byte{1};  // two positions and two values
  const Copies copies{{before, 1}, after};
  const Difference found = take_differences({&copies, 1}, 1, {})[0];
  ASSERT_TRUE(found.delta.has_value());
  EXPECT_EQ(found.delta->positions, stored({0, 1}));
  EXPECT_EQ(found.delta->values, stored({1, 1}));
}

TEST(Sync, TensorsOfACallAreComparedEachForItself) {
  Vector one(10), same(7, std::byte{3}), none;
  Vector one_now = one;
  one_now[9] = std::byte{5};
  const Vector same_now = same, none_now;
  const Copies copies[] = {{{one, 2}, one_now}, {{same, 1}, same_now}, {{none, 8}, none_now}};
  const std::vector<Difference> found = take_differences(copies, 2, {});
  EXPECT_EQ(found[0].changed, 1u);
  EXPECT_EQ(found[0].delta->positions, stored({4}));
  EXPECT_EQ(found[0].delta->values, stored({0, 5}));
  for (const size_t i : {1, 2}) {
    EXPECT_EQ(found[i].changed, 0u);
    EXPECT_EQ(found[i].sum_change, 0u);
    EXPECT_TRUE(found[i].delta->positions.empty());
  }
}

TEST(Sync, ASumOfPartsIsThatOfTheTensor) {
  Random random(7);
  const Vector tensor = random.bytes(5000);
  const Elements parts[] = {{std::span(tensor).first(2000), 4, 0},
                            {std::span(tensor).subspan(2000), 4, 500}};
  const std::vector<uint64_t> sums = element_sums(parts, 2, {});
  EXPECT_EQ(sums[0] + sums[1], plain_sum(tensor, 4));
}

INSTANTIATE_TEST_SUITE_P(Sync, EveryItemsize, testing::Values(1, 2, 4, 8, 16));

TEST(Sync, TheSumsOfTheDocumentationComeOut) {
  const auto f32 = bytes_of({0, 0, 0x80, 0x3F, 0, 0, 0x20, 0xC0});
  const auto bf16 = bytes_of({0x80, 0x3F, 0x20, 0xC0});
  const auto c128 = bytes_of({0, 0, 0, 0, 0, 0, 0xF0, 0x3F, 0, 0, 0, 0, 0, 0, 0, 0x40});
  EXPECT_EQ(element_sum(bf16, 2), 0x726F92C4F5398979u);
  EXPECT_EQ(element_sum(f32, 4), 0x65033E04A3DC3FC9u);
  EXPECT_EQ(element_sum(c128, 16), 0x1111AC5D8C82BD68u);
  EXPECT_EQ(element_sum({}, 4), 0u);
}

TEST(Sync, PositionsThatAreNotInTheTensorAreRefused) {
  EXPECT_EQ(refusal(bytes_of({9}), bytes_of({1}), 10), "");
  EXPECT_NE(refusal(bytes_of({10}), bytes_of({1}), 10).find("layer.weight"), std::string::npos);
  EXPECT_NE(refusal(bytes_of({9, 0}), bytes_of({1, 1}), 10), "");
  EXPECT_NE(refusal(bytes_of({0}), bytes_of({1}), 0), "");
  // Gaps whose sum would wrap to a number that lies in the tensor.
  auto wraps = bytes_of({5, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 1});
  EXPECT_NE(refusal(wraps, bytes_of({1, 1}), 10), "");
}

TEST(Sync, PositionsInAnotherFormThanTheShortestAreRefused) {
  EXPECT_NE(refusal(bytes_of({0x85, 0}), bytes_of({1}), 10), "");          // longer than needed
  EXPECT_NE(refusal(bytes_of({0x85}), bytes_of({1}), 10), "");             // ends too early
  EXPECT_NE(refusal(Vector(11, std::byte{0x81}), bytes_of({1}), 10), "");  // eleven bytes
  auto wide = Vector(10, std::byte{0x80});
  wide[9] = std::byte{2};  // 2^64
  EXPECT_NE(refusal(wide, bytes_of({1}), ~uint64_t{0}), "");
}

TEST(Sync, EachPositionHasAValue) {
  EXPECT_NE(refusal(bytes_of({1, 1}), bytes_of({1}), 10), "");
  EXPECT_NE(refusal(bytes_of({1}), bytes_of({1, 2}), 10), "");
  EXPECT_EQ(refusal({}, {}, 10), "");
}

TEST(Sync, EveryKernelFindsTheSameSumsAndDifferences) {
  Random random(11);
  const ElementKernel& plain = compiled_element_kernels().back();
  for (const ElementKernel& kernel : compiled_element_kernels()) {
    if (!kernel.usable()) continue;
    for (size_t n = 0; n <= kBlock; ++n) {
      std::vector<uint64_t> numbers(n), words(2 * kBlock);
      for (uint64_t& number : numbers) number = random.below(uint64_t{1} << 40);
      for (uint64_t& word : words) word = random.below(~uint64_t{0});
      for (const size_t nwords : {1, 2})
        EXPECT_EQ(kernel.sum(numbers.data(), words.data(), nwords, n),
                  plain.sum(numbers.data(), words.data(), nwords, n))
            << kernel.name;
    }
    for (const size_t itemsize : {1, 2, 4, 8, 16}) {
      for (const uint64_t one_in : {1, 3, 40, 1000}) {
        for (const size_t shorter : {0, 1, 37}) {
          const size_t count = kComparedByKernel / itemsize - shorter;
          const Vector before = random.bytes(count * itemsize);
          Vector after = before;
          std::vector<uint16_t> expected;
          for (size_t i = 0; i < count; ++i) {
            if (random.below(one_in) != 0) continue;
            after[i * itemsize + random.below(itemsize)] ^= std::byte{0x80};
            expected.push_back(static_cast<uint16_t>(i));
          }
          std::vector<uint16_t> places(count + kSparePlaces);
          places.resize(
              kernel.differing(before.data(), after.data(), count, itemsize, places.data()));
          EXPECT_EQ(places, expected) << kernel.name << ", " << itemsize;
        }
      }
    }
  }
}

TEST(Sync, GapsOfAnyLengthLeadToTheirNumbers) {
  Random random(13);
  for (const unsigned most_bits : {1, 7, 8, 14, 16, 40}) {
    std::vector<uint64_t> expected;
    Vector bytes(1000 * kMaxLeb128);
    std::byte* to = bytes.data();
    uint64_t next = 3;
    for (int i = 0; i < 1000; ++i) {
      const uint64_t gap = random.below(uint64_t{1} << most_bits);
      to = put_leb128(to, gap);
      expected.push_back(next + gap);
      next = expected.back() + 1;
    }
    for (const size_t at_once : {1, 63, 128, 1000}) {
      std::vector<uint64_t> numbers(1000);
      const std::byte* from = bytes.data();
      uint64_t behind = 3;
      for (size_t i = 0; i < numbers.size(); i += at_once)
        from = take_numbers(from, to, behind,
                            std::span(numbers).subspan(i, std::min(at_once, 1000 - i)));
      EXPECT_EQ(numbers, expected);
      EXPECT_EQ(behind, next);
      EXPECT_EQ(from, to);
    }
  }
}

TEST(Sync, NumbersOfAnyLengthComeBackFromTheirBytes) {
  for (unsigned bits = 0; bits < 64; ++bits) {
    for (const uint64_t value :
         {uint64_t{1} << bits, (uint64_t{1} << bits) - 1, ~uint64_t{0} >> bits}) {
      std::byte bytes[kMaxLeb128];
      std::byte* const end = put_leb128(bytes, value);
      EXPECT_EQ(static_cast<size_t>(end - bytes), leb128_nbytes(value));
      uint64_t taken = 0;
      EXPECT_EQ(take_leb128(bytes, taken), end);
      EXPECT_EQ(taken, value);
      EXPECT_EQ(check_leb128(bytes, end, taken), end);
      EXPECT_EQ(taken, value);
    }
  }
}

}  // namespace
}  // namespace tensorizer::sync
