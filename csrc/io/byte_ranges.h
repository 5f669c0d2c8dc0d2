// A set of byte positions, kept as disjoint ranges. Confined to one thread.
#pragma once

#include <cstdint>
#include <iterator>
#include <map>

namespace tensorizer::io {

class ByteRanges {
 public:
  void add(uint64_t begin, uint64_t end) {
    if (begin >= end) return;
    auto next = ranges_.upper_bound(begin);
    if (next != ranges_.begin() && std::prev(next)->second >= begin) --next;
    while (next != ranges_.end() && next->first <= end) {
      begin = begin < next->first ? begin : next->first;
      end = end > next->second ? end : next->second;
      next = ranges_.erase(next);
    }
    ranges_.emplace(begin, end);
  }

  // First position in [begin, end) that is not in the set; `end` where there is none.
  uint64_t first_missing(uint64_t begin, uint64_t end) const {
    auto next = ranges_.upper_bound(begin);
    if (next != ranges_.begin() && std::prev(next)->second > begin) begin = std::prev(next)->second;
    return begin < end ? begin : end;
  }

  // First position in [begin, end) that is in the set; `end` where there is none.
  uint64_t first_present(uint64_t begin, uint64_t end) const {
    auto next = ranges_.upper_bound(begin);
    if (next != ranges_.begin() && std::prev(next)->second > begin)
      return begin < end ? begin : end;
    return next != ranges_.end() && next->first < end ? next->first : end;
  }

  bool contains(uint64_t begin, uint64_t end) const { return first_missing(begin, end) == end; }

  // Moves everything from `at` on by `nbytes`; the positions [at, at + nbytes) are not in the set
  // afterwards.
  void insert_gap(uint64_t at, uint64_t nbytes) {
    if (nbytes == 0) return;
    std::map<uint64_t, uint64_t> moved;
    for (const auto& [begin, end] : ranges_) {
      if (begin < at) moved.emplace(begin, end < at ? end : at);
      if (end > at) moved.emplace((begin > at ? begin : at) + nbytes, end + nbytes);
    }
    ranges_ = std::move(moved);
  }

 private:
  std::map<uint64_t, uint64_t> ranges_;  // begin -> end; no two touch
};

}  // namespace tensorizer::io
