// The order of units for records whose bytes must be hashed while they pass: several large records
// at a time, so that as many SHA-256 chains can run. Pure.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <span>
#include <utility>
#include <vector>

namespace tensorizer::digest {

// A unit that holds whole records and no step of a larger one.
inline constexpr uint32_t kNoRecord = std::numeric_limits<uint32_t>::max();
// Records at once for each worker: it finds two chains to hash side by side.
inline constexpr size_t kDealtPerWorker = 2;
// From so many lanes of SHA-256 on, it pays to wait until as many records have a step as fit into
// the buffers of all workers.
inline constexpr size_t kManyLanes = 8;
// Where more are dealt than that, another one begins only after so many units: its memory may still
// be on its way, and the others give the device work until it is there.
inline constexpr size_t kUnitsBeforeNext = 8;

// Which records begin first. If the longest one began last, one thread would hash it while the
// others have nothing left. But unfinished parts of an upload, and memory of a device, want
// neighbours.
enum class Begin : bool { in_order, longest_first };

// records[i] is the record that unit i is a part of; the units of one record are neighbours.
// Returns the numbers of all units in the order in which to take them: those of one record in their
// order, `at_first` records in turn, and slowly more, up to `at_once`.
inline std::vector<uint32_t> deal(std::span<const uint32_t> records, size_t at_once,
                                  size_t at_first, Begin begin = Begin::in_order) {
  struct Run {
    uint32_t next, end;
    uint32_t left() const noexcept { return end - next; }
  };
  const auto count = static_cast<uint32_t>(records.size());
  std::vector<Run> runs;
  for (uint32_t unit = 0; unit < count; unit = runs.back().end) {
    Run run{unit, unit + 1};
    while (run.end < count && records[unit] != kNoRecord && records[run.end] == records[unit])
      ++run.end;
    runs.push_back(run);
  }
  if (begin == Begin::longest_first)
    std::ranges::stable_sort(runs, std::ranges::greater{}, &Run::left);
  std::vector<uint32_t> order;
  order.reserve(count);
  std::vector<Run> open;
  for (size_t begun = 0; order.size() < count;) {
    const size_t most = std::min(at_once, at_first + order.size() / kUnitsBeforeNext);
    while (open.size() < most && begun < runs.size()) open.push_back(runs[begun++]);
    for (Run& run : open) order.push_back(run.next++);
    std::erase_if(open, [](const Run& run) { return run.left() == 0; });
  }
  return order;
}

// Puts units into that order; record_of(unit) is its record, or kNoRecord.
template <class Unit, class RecordOf>
void deal_units(std::vector<Unit>& units, const RecordOf& record_of, size_t at_once,
                size_t at_first, Begin begin = Begin::in_order) {
  std::vector<uint32_t> records;
  records.reserve(units.size());
  for (const Unit& unit : units) records.push_back(record_of(unit));
  std::vector<Unit> dealt;
  dealt.reserve(units.size());
  for (const uint32_t number : deal(records, at_once, at_first, begin))
    dealt.push_back(units[number]);
  units = std::move(dealt);
}

}  // namespace tensorizer::digest
