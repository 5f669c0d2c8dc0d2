#include "sync/delta.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <memory>
#include <string>
#include <utility>

#include "core/checked_math.h"
#include "core/error.h"
#include "sync/element_kernels.h"
#include "sync/element_sum.h"
#include "sync/leb128.h"
#include "sync/pieces.h"

namespace tensorizer::sync {
namespace {

constexpr uint64_t kComparedAtOnce = uint64_t{256} << 10;  // bytes: both copies stay in the cache
constexpr uint64_t kPositionsAtOnce = uint64_t{1} << 14;
constexpr uint64_t kElementsMerged = uint64_t{1} << 15;  // whose values fit into the cache

// Bytes that grow at their end, a few at a time.
class Grown {
 public:
  // The end, with room for `nbytes` more.
  std::byte* room(size_t nbytes) {
    if (room_ - size_ < nbytes) {
      room_ = std::max(2 * room_, size_ + std::max<size_t>(nbytes, 1024));
      auto larger = std::make_unique_for_overwrite<std::byte[]>(room_);
      if (size_ > 0) std::memcpy(larger.get(), bytes_.get(), size_);
      bytes_ = std::move(larger);
    }
    return bytes_.get() + size_;
  }
  void end_at(const std::byte* end) noexcept { size_ = static_cast<size_t>(end - bytes_.get()); }
  std::byte* copy_to(std::byte* to) const {
    if (size_ == 0) return to;
    std::memcpy(to, bytes_.get(), size_);
    return to + size_;
  }
  void assign(const std::byte* from, size_t nbytes) {
    bytes_ = std::make_unique_for_overwrite<std::byte[]>(nbytes);
    if (nbytes > 0) std::memcpy(bytes_.get(), from, nbytes);
    size_ = room_ = nbytes;
  }
  const std::byte* data() const noexcept { return bytes_.get(); }
  size_t size() const noexcept { return size_; }

 private:
  std::unique_ptr<std::byte[]> bytes_;
  size_t size_ = 0, room_ = 0;
};

// What changed in a piece of a tensor. The first position is kept apart: its gap depends on the
// pieces before.
struct Changes {
  uint64_t first = 0, last = 0;
  uint64_t changed = 0;
  uint64_t sum_change = 0;
  size_t gaps_nbytes = 0;  // of the positions behind the first
  bool kept = true;        // the bytes are here
  Grown gaps, values;
};

template <size_t kItemsize>
class ChangesWriter {
 public:
  // Room for so many more elements.
  ChangesWriter(Changes& changes, size_t elements)
      : changes_(changes),
        gap_(changes.gaps.room(elements * kMaxLeb128)),
        value_(changes.values.room(elements * kItemsize)) {}
  ~ChangesWriter() {
    changes_.gaps.end_at(gap_);
    changes_.values.end_at(value_);
    changes_.gaps_nbytes = changes_.gaps.size();
  }
  ChangesWriter(const ChangesWriter&) = delete;
  ChangesWriter& operator=(const ChangesWriter&) = delete;

  void add(uint64_t number, const std::byte* value) {
    if (changes_.changed++ == 0)
      changes_.first = number;
    else
      gap_ = put_leb128(gap_, number - changes_.last - 1);
    changes_.last = number;
    std::memcpy(value_, value, kItemsize);
    value_ += kItemsize;
  }

 private:
  Changes& changes_;
  std::byte *gap_, *value_;
};

// Writes the elements of a piece that is kept to their places.
template <size_t kItemsize>
void take_over(const Changes& piece, std::byte* to) {
  const std::byte *gap = piece.gaps.data(), *value = piece.values.data();
  const std::byte* const end = gap + piece.gaps.size();
  std::memcpy(to + piece.first * kItemsize, value, kItemsize);
  uint64_t next = piece.first + 1;
  std::array<uint64_t, kBlock> numbers;
  for (uint64_t left = piece.changed - 1; left > 0;) {
    const std::span<uint64_t> block = std::span(numbers).first(std::min<uint64_t>(left, kBlock));
    gap = take_numbers(gap, end, next, block);
    for (const uint64_t number : block)
      std::memcpy(to + number * kItemsize, value += kItemsize, kItemsize);
    left -= block.size();
  }
}

// Where the pieces of one tensor go in its delta.
struct Layout {
  struct Place {
    size_t gaps, values;
    uint64_t gap;  // of the first position of the piece
  };
  std::vector<Place> places;
  size_t gaps = 0, values = 0;

  Layout(std::span<const Changes> pieces, size_t itemsize) {
    uint64_t next = 0;
    places.reserve(pieces.size());
    for (const Changes& piece : pieces) {
      places.push_back({gaps, values, piece.changed == 0 ? 0 : piece.first - next});
      if (piece.changed == 0) continue;
      gaps += leb128_nbytes(piece.first - next) + piece.gaps_nbytes;
      values += piece.changed * itemsize;
      next = piece.last + 1;
    }
  }
};

// Puts a piece at its place, and frees it.
void join(Changes& piece, const Layout::Place& place, Delta& delta) {
  if (piece.changed == 0) return;
  piece.gaps.copy_to(put_leb128(delta.positions.data() + place.gaps, place.gap));
  piece.values.copy_to(delta.values.data() + place.values);
  piece.gaps = {};
  piece.values = {};
}

// Numbers of elements and the words of them, as kernels take them.
template <size_t kItemsize>
struct Block {
  static constexpr size_t kWords = Element<kItemsize>::kWords;

  // Takes the element at `from` as the i-th.
  void take(size_t i, const std::byte* from) noexcept {
    const Element<kItemsize> element(from);
    for (size_t word = 0; word < kWords; ++word) words[word * kBlock + i] = element.words[word];
  }
  uint64_t sum(const uint64_t* numbers, size_t n) const noexcept {
    return element_kernel_here().sum(numbers, words.data(), kWords, n);
  }

  std::array<uint64_t, kWords * kBlock> words;
};

// A piece whose delta is longer than itself is counted, but neither kept nor taken over: most
// tensors with such pieces are written whole.
template <size_t kItemsize>
void compare(const Copies& copies, uint64_t first, uint64_t end, bool keep_all, Changes& changes) {
  std::byte* const before = copies.before.bytes.data();
  const std::byte* const after = copies.after.data();
  changes = {};
  // Room for all elements of a piece: the gaps in it have three bytes at most.
  static_assert(kComparedAtOnce < (uint64_t{1} << 21));
  constexpr size_t kGapsNbytes = kComparedAtOnce / kItemsize * 3;
  thread_local const auto room =
      std::make_unique_for_overwrite<std::byte[]>(kComparedAtOnce * 3 + kComparedAtOnce);
  std::byte *gap = room.get(), *value = room.get() + kGapsNbytes;
  uint64_t next = first, sum_change = 0;
  constexpr uint64_t kAtOnce = kComparedByKernel / kItemsize;
  std::array<uint16_t, kAtOnce + kSparePlaces> places;
  std::array<uint64_t, kBlock> numbers;
  Block<kItemsize> was, is;
  for (uint64_t begin = first; begin < end; begin += kAtOnce) {
    const size_t found =
        element_kernel_here().differing(before + begin * kItemsize, after + begin * kItemsize,
                                        std::min(kAtOnce, end - begin), kItemsize, places.data());
    for (size_t done = 0; done < found; done += kBlock) {
      const size_t n = std::min(found - done, kBlock);
      for (size_t i = 0; i < n; ++i) {
        const uint64_t number = numbers[i] = begin + places[done + i];
        was.take(i, before + number * kItemsize);
        is.take(i, after + number * kItemsize);
        gap = put_leb128(gap, number - next);
        next = number + 1;
        std::memcpy(value, after + number * kItemsize, kItemsize);
        value += kItemsize;
      }
      sum_change += is.sum(numbers.data(), n) - was.sum(numbers.data(), n);
    }
  }
  changes.changed = static_cast<uint64_t>(value - (room.get() + kGapsNbytes)) / kItemsize;
  changes.sum_change = sum_change;
  if (changes.changed == 0) return;
  // The first gap is that from the end of the piece before, which is not known here.
  uint64_t skipped = 0;
  const std::byte* const gaps = take_leb128(room.get(), skipped);
  changes.first = first + skipped;
  changes.last = next - 1;
  changes.gaps_nbytes = static_cast<size_t>(gap - gaps);
  const size_t values_nbytes = changes.changed * kItemsize;
  if (!keep_all && changes.gaps_nbytes + values_nbytes > (end - first) * kItemsize) {
    changes.kept = false;
    return;
  }
  changes.gaps.assign(gaps, changes.gaps_nbytes);
  changes.values.assign(room.get() + kGapsNbytes, values_nbytes);
  take_over<kItemsize>(changes, before);
}

// Calls visit(numbers, index) for the positions of a piece, in blocks, index being that of the
// first of a block. announce(numbers) is called before the block in front of it is visited, so that
// memory can be asked for that is needed later.
template <class Announce, class Visit>
void for_positions(const CheckedDelta& delta, size_t piece, const Announce& announce,
                   const Visit& visit) {
  using Numbers = std::span<const uint64_t>;
  const CheckedDelta::Mark begin = delta.marks()[piece], end = delta.marks()[piece + 1];
  std::array<std::array<uint64_t, kBlock>, 2> blocks;
  const std::byte* from = delta.positions().data() + begin.offset;
  const std::byte* const last = delta.positions().data() + delta.positions().size();
  uint64_t next = begin.next;
  const auto read = [&](std::array<uint64_t, kBlock>& block, uint64_t index) {
    const auto numbers = std::span(block).first(std::min<uint64_t>(kBlock, end.index - index));
    from = take_numbers(from, last, next, numbers);
    announce(Numbers(numbers));
    return numbers.size();
  };
  uint64_t index = begin.index;
  size_t n = read(blocks[0], index);
  for (size_t current = 0; n > 0; current ^= 1) {
    const size_t following = read(blocks[current ^ 1], index + n);
    visit(Numbers(blocks[current]).first(n), index);
    index += n;
    n = following;
  }
}

// Asks for the memory of some elements: line by line where they are many in each, so that no line
// is asked for twice.
template <size_t kItemsize, int kForWriting>
void ask_for(const std::byte* tensor, std::span<const uint64_t> numbers) noexcept {
  if (numbers.empty()) return;
  constexpr uint64_t kLine = 64;
  const std::byte* const first = tensor + numbers.front() * kItemsize;
  const std::byte* const last = tensor + numbers.back() * kItemsize;
  if (static_cast<uint64_t>(last - first) < numbers.size() * kLine) {
    for (const std::byte* line = first; line < last + kLine; line += kLine)
      __builtin_prefetch(line, kForWriting);
  } else {
    for (const uint64_t number : numbers)
      __builtin_prefetch(tensor + number * kItemsize, kForWriting);
  }
}

// The positions of a delta, a block at a time.
template <size_t kItemsize>
struct Cursor {
  const std::byte *from, *end, *value;
  uint64_t next, left;  // as take_numbers() has it, and positions that are not in `numbers`
  size_t at = 0, size = 0;
  std::array<uint64_t, kBlock> numbers;

  // Calls visit(number, value) for the positions before `stop`.
  template <class Visit>
  void visit_before(uint64_t stop, const Visit& visit) {
    for (;;) {
      for (; at < size && numbers[at] < stop; ++at, value += kItemsize) visit(numbers[at], value);
      if (at < size || left == 0) return;
      at = 0;
      size = std::min<uint64_t>(left, kBlock);
      from = take_numbers(from, end, next, std::span(numbers).first(size));
      left -= size;
    }
  }
};

constexpr auto announce_nothing = [](std::span<const uint64_t>) {};

std::vector<PieceOf> pieces_of(std::span<const Change> changes) {
  return all_pieces(changes.size(), [&](size_t i) { return changes[i].delta->marks().size() - 1; });
}

}  // namespace

std::vector<Difference> take_differences(std::span<const Copies> tensors, unsigned workers,
                                         const std::stop_token& stop) {
  for (const Copies& copies : tensors) {
    if (copies.before.bytes.size() != copies.after.size())
      throw Error(Errc::invalid_argument, "expected two copies of one size, got " +
                                              std::to_string(copies.before.bytes.size()) + " and " +
                                              std::to_string(copies.after.size()) + " bytes");
  }
  const auto compare_piece = [&](const PieceOf& at, bool keep_all, Changes& changes) {
    const Copies& copies = tensors[at.tensor];
    with_itemsize(copies.before.itemsize, [&]<size_t kItemsize>() {
      constexpr uint64_t kAtOnce = kComparedAtOnce / kItemsize;
      const uint64_t first = at.piece * kAtOnce;
      compare<kItemsize>(copies, first, std::min(copies.before.count(), first + kAtOnce), keep_all,
                         changes);
    });
  };
  const std::vector<PieceOf> pieces = all_pieces(tensors.size(), [&](size_t i) {
    return ceil_div(tensors[i].before.bytes.size(), kComparedAtOnce);
  });
  std::vector<Changes> found(pieces.size());
  for_pieces(pieces, workers, stop,
             [&](const PieceOf& at, size_t i) { compare_piece(at, false, found[i]); });

  std::vector<Difference> differences(tensors.size());
  std::vector<Layout> layouts;
  layouts.reserve(tensors.size());
  for (size_t tensor = 0, begin = 0; tensor < tensors.size(); ++tensor) {
    const Copies& copies = tensors[tensor];
    const size_t n = ceil_div(copies.before.bytes.size(), kComparedAtOnce);
    const std::span<Changes> of_tensor = std::span(found).subspan(begin, n);
    begin += n;
    Difference& difference = differences[tensor];
    for (const Changes& piece : of_tensor) {
      difference.changed += piece.changed;
      difference.sum_change += piece.sum_change;
    }
    const Layout& layout = layouts.emplace_back(of_tensor, copies.before.itemsize);
    if (layout.gaps + layout.values > copies.before.bytes.size()) continue;
    difference.delta.emplace();
    difference.delta->positions.resize(layout.gaps);
    difference.delta->values.resize(layout.values);
  }
  for_pieces(pieces, workers, stop, [&](const PieceOf& at, size_t i) {
    std::optional<Delta>& delta = differences[at.tensor].delta;
    Changes& piece = found[i];
    if (delta) {
      if (!piece.kept) compare_piece(at, true, piece);
      join(piece, layouts[at.tensor].places[at.piece], *delta);
      return;
    }
    const std::span<std::byte> before = tensors[at.tensor].before.bytes;
    const size_t begin = at.piece * kComparedAtOnce;
    if (!piece.kept)
      std::memcpy(before.data() + begin, tensors[at.tensor].after.data() + begin,
                  std::min<size_t>(kComparedAtOnce, before.size() - begin));
    piece = {};
  });
  return differences;
}

CheckedDelta::CheckedDelta(const StoredDelta& stored, unsigned workers, const std::stop_token& stop)
    : positions_(stored.positions),
      values_(stored.values),
      count_(stored.count),
      itemsize_(stored.itemsize) {
  const auto fail = [&](const std::string& problem) {
    throw Error(Errc::malformed, "delta of tensor '" + printable(stored.tensor) + "': " + problem);
  };
  const std::byte* const begin = positions_.data();
  const std::byte* const end = begin + positions_.size();
  uint64_t next = 0;
  for (const std::byte* at = begin; at != end; ++changed_) {
    const uint64_t since_mark = changed_ % kPositionsAtOnce;
    if (since_mark == 0) marks_.push_back({next, changed_, static_cast<size_t>(at - begin)});
    if (at != begin) {
      const ShortGaps gaps = check_short_gaps(at, end);
      const uint64_t elements = gaps.sum + gaps.count;
      if (gaps.count > 0 && gaps.count <= kPositionsAtOnce - since_mark &&
          elements <= count_ - next) {
        next += elements;
        at += gaps.nbytes;
        changed_ += gaps.count - 1;
        continue;
      }
    }
    uint64_t gap = 0;
    const std::byte* const behind = check_leb128(at, end, gap);
    if (behind == nullptr)
      fail("position " + std::to_string(changed_) + " at byte " + std::to_string(at - begin) +
           " of 'positions' is not a shortest LEB128 number of 64 bits");
    if (next >= count_ || gap >= count_ - next)
      fail("position " + std::to_string(changed_) + ": expected a number below " +
           std::to_string(count_) + ", got one past it");
    next += gap + 1;
    at = behind;
  }
  marks_.push_back({next, changed_, positions_.size()});
  const auto expected = checked_mul(changed_, itemsize_);
  if (!expected || *expected != values_.size())
    fail("'values': expected " + std::to_string(changed_) + " elements of " +
         std::to_string(itemsize_) + " bytes, got " + std::to_string(values_.size()) + " bytes");
  with_itemsize(itemsize_, [&]<size_t kItemsize>() {
    std::vector<uint64_t> sums(marks_.size() - 1);
    for_each_index(sums.size(), workers, stop, [&](size_t piece, const std::stop_token&) {
      uint64_t sum = 0;
      Block<kItemsize> block;
      for_positions(*this, piece, announce_nothing,
                    [&](std::span<const uint64_t> numbers, uint64_t index) {
                      const std::byte* const values = values_.data() + index * kItemsize;
                      for (size_t i = 0; i < numbers.size(); ++i)
                        block.take(i, values + i * kItemsize);
                      sum += block.sum(numbers.data(), numbers.size());
                    });
      sums[piece] = sum;
    });
    for (const uint64_t sum : sums) sum_of_values_ += sum;
  });
}

Delta merged(std::span<const CheckedDelta* const> deltas, unsigned workers,
             const std::stop_token& stop) {
  const uint64_t count = deltas.front()->count();
  return with_itemsize(deltas.front()->itemsize(), [&]<size_t kItemsize>() {
    // As many elements to a piece as give it about kPositionsAtOnce positions of each delta.
    uint64_t most = 0;
    for (const CheckedDelta* delta : deltas) most = std::max(most, delta->changed());
    const uint64_t pieces_wanted = std::max<uint64_t>(ceil_div(most, kPositionsAtOnce), 1);
    const uint64_t at_once =
        align_up(std::max<uint64_t>(ceil_div(count, pieces_wanted), 1), kElementsMerged);
    std::vector<Changes> pieces(ceil_div(count, at_once));
    for_each_index(pieces.size(), workers, stop, [&](size_t i, const std::stop_token&) {
      const uint64_t first = i * at_once, end = std::min(count, first + at_once);
      std::vector<Cursor<kItemsize>> cursors;
      cursors.reserve(deltas.size());
      for (const CheckedDelta* delta : deltas) {
        const auto marks = delta->marks();
        const auto behind = std::upper_bound(
            marks.begin(), marks.end(), first,
            [](uint64_t n, const CheckedDelta::Mark& mark) { return n < mark.next; });
        const auto mark = behind == marks.begin() ? behind : behind - 1;
        Cursor<kItemsize>& cursor = cursors.emplace_back();
        cursor.from = delta->positions().data() + mark->offset;
        cursor.end = delta->positions().data() + delta->positions().size();
        cursor.value = delta->values().data() + mark->index * kItemsize;
        cursor.next = mark->next;
        cursor.left = delta->changed() - mark->index;
        cursor.visit_before(first, [](uint64_t, const std::byte*) {});
      }
      std::vector<std::byte> newest(kElementsMerged * kItemsize);
      std::vector<uint64_t> present(kElementsMerged / 64);
      for (uint64_t block = first; block < end; block += kElementsMerged) {
        const uint64_t block_end = std::min(end, block + kElementsMerged);
        size_t found = 0;
        for (Cursor<kItemsize>& cursor : cursors) {
          cursor.visit_before(block_end, [&](uint64_t number, const std::byte* value) {
            const uint64_t place = number - block;
            std::memcpy(newest.data() + place * kItemsize, value, kItemsize);
            present[place / 64] |= uint64_t{1} << (place % 64);
            ++found;
          });
        }
        if (found == 0) continue;
        ChangesWriter<kItemsize> writer(pieces[i], std::min<size_t>(found, block_end - block));
        for (size_t word = 0; word < present.size(); ++word) {
          for (uint64_t bits = std::exchange(present[word], 0); bits != 0; bits &= bits - 1) {
            const uint64_t place = word * 64 + static_cast<unsigned>(std::countr_zero(bits));
            writer.add(block + place, newest.data() + place * kItemsize);
          }
        }
      }
    });
    const Layout layout(pieces, kItemsize);
    Delta delta;
    delta.positions.resize(layout.gaps);
    delta.values.resize(layout.values);
    for_each_index(pieces.size(), workers, stop, [&](size_t i, const std::stop_token&) {
      join(pieces[i], layout.places[i], delta);
    });
    return delta;
  });
}

std::vector<uint64_t> sum_changes(std::span<const Change> changes, unsigned workers,
                                  const std::stop_token& stop) {
  const std::vector<PieceOf> pieces = pieces_of(changes);
  std::vector<uint64_t> before(pieces.size());
  for_pieces(pieces, workers, stop, [&](const PieceOf& at, size_t i) {
    const Change& change = changes[at.tensor];
    const std::byte* const from = change.tensor.bytes.data();
    with_itemsize(change.delta->itemsize(), [&]<size_t kItemsize>() {
      uint64_t sum = 0;
      Block<kItemsize> block;
      for_positions(
          *change.delta, at.piece,
          [&](std::span<const uint64_t> numbers) { ask_for<kItemsize, 0>(from, numbers); },
          [&](std::span<const uint64_t> numbers, uint64_t) {
            for (size_t k = 0; k < numbers.size(); ++k)
              block.take(k, from + numbers[k] * kItemsize);
            sum += block.sum(numbers.data(), numbers.size());
          });
      before[i] = sum;
    });
  });
  std::vector<uint64_t> result(changes.size());
  for (size_t i = 0; i < changes.size(); ++i) result[i] = changes[i].delta->sum_of_values();
  for (size_t i = 0; i < pieces.size(); ++i) result[pieces[i].tensor] -= before[i];
  return result;
}

void write(std::span<const Change> changes, unsigned workers, const std::stop_token& stop) {
  for_pieces(pieces_of(changes), workers, stop, [&](const PieceOf& at, size_t) {
    const Change& change = changes[at.tensor];
    std::byte* const to = change.tensor.bytes.data();
    const std::byte* const values = change.delta->values().data();
    with_itemsize(change.delta->itemsize(), [&]<size_t kItemsize>() {
      for_positions(
          *change.delta, at.piece,
          [&](std::span<const uint64_t> numbers) { ask_for<kItemsize, 1>(to, numbers); },
          [&](std::span<const uint64_t> numbers, uint64_t index) {
            const std::byte* value = values + index * kItemsize;
            for (const uint64_t number : numbers) {
              std::memcpy(to + number * kItemsize, value, kItemsize);
              value += kItemsize;
            }
          });
    });
  });
}

void decode(const CheckedDelta& delta, uint64_t first, std::span<int64_t> numbers) {
  const uint64_t end = first + numbers.size();
  for (size_t piece = first / kPositionsAtOnce;
       piece + 1 < delta.marks().size() && delta.marks()[piece].index < end; ++piece)
    for_positions(delta, piece, announce_nothing,
                  [&](std::span<const uint64_t> block, uint64_t index) {
                    for (size_t i = 0; i < block.size(); ++i, ++index)
                      if (index >= first && index < end)
                        numbers[index - first] = static_cast<int64_t>(block[i]);
                  });
}

uint64_t sum_of(std::span<const int64_t> numbers, Bytes values, size_t itemsize) {
  return with_itemsize(itemsize, [&]<size_t kItemsize>() {
    uint64_t sum = 0;
    for (size_t i = 0; i < numbers.size(); ++i)
      sum += mixed(mixed_number(static_cast<uint64_t>(numbers[i])),
                   Element<kItemsize>(values.data() + i * kItemsize));
    return sum;
  });
}

}  // namespace tensorizer::sync
