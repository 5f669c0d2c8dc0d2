// What changed in tensors, docs/format.md: the numbers of the elements that changed, and their new
// bytes. Found by comparing two copies, merged, and written over a third one. Functions work in
// pieces on at most `workers` threads. Pure but for the memory that they are told to write.
//
// Positions are element numbers in ascending order, each as the gap to the number behind the
// previous one, LEB128 in its shortest form. Elements are compared as bytes: a NaN equals itself.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <optional>
#include <span>
#include <stop_token>
#include <string_view>
#include <utility>
#include <vector>

namespace tensorizer::sync {

using Bytes = std::span<const std::byte>;

// Memory of a contiguous tensor.
struct Tensor {
  std::span<std::byte> bytes;  // a multiple of
  size_t itemsize = 1;

  uint64_t count() const noexcept { return bytes.size() / itemsize; }
};

// Leaves the bytes of a vector that grows as they are: several threads write each of them anyway.
template <class T>
struct Unwritten : std::allocator<T> {
  template <class U>
  struct rebind {
    using other = Unwritten<U>;
  };
  template <class U>
  void construct(U* at) noexcept {
    ::new (static_cast<void*>(at)) U;
  }
  template <class U, class... Args>
  void construct(U* at, Args&&... args) {
    std::construct_at(at, std::forward<Args>(args)...);
  }
};
using UnwrittenBytes = std::vector<std::byte, Unwritten<std::byte>>;

// A delta as it is stored.
struct Delta {
  UnwrittenBytes positions;
  UnwrittenBytes values;
};

struct Difference {
  uint64_t changed = 0;     // elements
  uint64_t sum_change = 0;  // of element_sum(), modulo 2^64
  // nullopt where the whole tensor is fewer bytes. Without a change: empty.
  std::optional<Delta> delta;
};

// Two copies of one tensor, of the same number of bytes.
struct Copies {
  Tensor before;
  Bytes after;
};

// What changed in each tensor. Afterwards `before` holds what `after` does; both are read once.
std::vector<Difference> take_differences(std::span<const Copies> tensors, unsigned workers,
                                         const std::stop_token& stop);

// Where a delta comes from: two tensors of a file, and what they are about.
struct StoredDelta {
  Bytes positions, values;
  uint64_t count = 0;  // elements of the tensor
  size_t itemsize = 1;
  std::string_view tensor{};  // its name, for messages
};

// A delta that was checked: every position lies in the tensor, and each has a value. Borrows the
// bytes that it was made of, which must not change meanwhile.
class CheckedDelta {
 public:
  // Where a piece of the positions begins: pieces are worked on by several threads.
  struct Mark {
    uint64_t next = 0;   // the number behind the previous position
    uint64_t index = 0;  // of the first position of the piece
    size_t offset = 0;   // of its bytes
  };

  // Works on at most `workers` threads. Error(malformed) that names the tensor where the bytes are
  // no delta of it.
  explicit CheckedDelta(const StoredDelta& stored, unsigned workers = 1,
                        const std::stop_token& stop = {});

  uint64_t changed() const noexcept { return changed_; }
  uint64_t count() const noexcept { return count_; }
  size_t itemsize() const noexcept { return itemsize_; }
  Bytes positions() const noexcept { return positions_; }
  Bytes values() const noexcept { return values_; }
  // The last one is the end.
  std::span<const Mark> marks() const noexcept { return marks_; }
  // Of the elements that changed, what their new values add to element_sum().
  uint64_t sum_of_values() const noexcept { return sum_of_values_; }

 private:
  Bytes positions_, values_;
  uint64_t count_;
  size_t itemsize_;
  uint64_t changed_ = 0;
  std::vector<Mark> marks_;
  uint64_t sum_of_values_ = 0;
};

// One delta for several, the oldest first and at least one, of one tensor: an element that several
// of them change has the value of the newest.
Delta merged(std::span<const CheckedDelta* const> deltas, unsigned workers,
             const std::stop_token& stop);

// A tensor, and the delta that is for it. REQUIRES: they agree about its size.
struct Change {
  Tensor tensor;
  const CheckedDelta* delta;
};

// By how much element_sum() of each tensor changes once write() has written its delta. Reads only.
std::vector<uint64_t> sum_changes(std::span<const Change> changes, unsigned workers,
                                  const std::stop_token& stop);

// Writes the values to their places. Twice does the same as once.
void write(std::span<const Change> changes, unsigned workers, const std::stop_token& stop);

// For tensors that another library changes: the positions [first, first + numbers.size()) as
// numbers; and what elements of these numbers and of the bytes `values` add to element_sum().
void decode(const CheckedDelta& delta, uint64_t first, std::span<int64_t> numbers);
uint64_t sum_of(std::span<const int64_t> numbers, Bytes values, size_t itemsize);

}  // namespace tensorizer::sync
