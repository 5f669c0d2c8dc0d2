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

// records[i] is the record that unit i is a part of; the units of one record are neighbours.
// Returns the numbers of all units in the order in which to take them: those of one record in their
// order, `at_first` records in turn, and slowly more, up to `at_once`. For bytes that must leave
// soon: unfinished parts of an upload, and memory of a device, want neighbours.
inline std::vector<uint32_t> deal(std::span<const uint32_t> records, size_t at_once,
                                  size_t at_first) {
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

// As deal(), for bytes that stay where they are: all records are under way from the first unit to
// the last, each as far as the others in proportion to its length. If a long record began, or
// ended, later than the others, one thread would hash it while the rest have nothing left.
inline std::vector<uint32_t> spread(std::span<const uint32_t> records) {
  const auto count = static_cast<uint32_t>(records.size());
  std::vector<double> places(count);  // of the middle of each unit in its record, between 0 and 1
  const auto place = [&](std::span<const uint32_t> units) {
    for (size_t i = 0; i < units.size(); ++i)
      places[units[i]] = (static_cast<double>(i) + 0.5) / static_cast<double>(units.size());
  };
  std::vector<uint32_t> run, whole, order(count);
  for (uint32_t unit = 0; unit < count; ++unit) {
    order[unit] = unit;
    if (records[unit] == kNoRecord) {
      whole.push_back(unit);
      continue;
    }
    run.push_back(unit);
    if (unit + 1 < count && records[unit + 1] == records[unit]) continue;
    place(run);
    run.clear();
  }
  place(whole);
  std::ranges::stable_sort(order, {}, [&](uint32_t unit) { return places[unit]; });
  return order;
}

// The record of each unit, for the two functions above; record_of(unit) is its record, or
// kNoRecord.
template <class Unit, class RecordOf>
std::vector<uint32_t> records_of(const std::vector<Unit>& units, const RecordOf& record_of) {
  std::vector<uint32_t> records;
  records.reserve(units.size());
  for (const Unit& unit : units) records.push_back(record_of(unit));
  return records;
}

template <class Unit>
void put_in_order(std::vector<Unit>& units, std::span<const uint32_t> order) {
  std::vector<Unit> ordered;
  ordered.reserve(units.size());
  for (const uint32_t number : order) ordered.push_back(units[number]);
  units = std::move(ordered);
}

}  // namespace tensorizer::digest
