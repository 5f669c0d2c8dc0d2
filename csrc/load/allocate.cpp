#include "load/allocate.h"

#include <algorithm>
#include <optional>
#include <string>

#include "core/checked_math.h"
#include "core/error.h"
#include "core/pages.h"
#include "device/host_arena.h"
#include "format/tensor_path.h"

namespace tensorizer::load {
namespace {

using device::HostArena;
using device::TensorMemory;

constexpr uint64_t kOwnMemoryNbytes = uint64_t{8} << 20;
constexpr uint64_t kSharedNbytes = uint64_t{16} << 20;
constexpr uint64_t kHostAlignment = 64;
constexpr uint64_t kElementAlignment = 8;                // of all dtypes
constexpr uint64_t kPlacedNbytes = uint64_t{256} << 10;  // smaller ones are copied as quickly

// Surplus bytes of old files included.
uint64_t memory_nbytes(const format::IndexEntry& entry) {
  return std::max(entry.data_nbytes, entry.loaded_nbytes);
}

// Groups the targets with data, or those without.
class MemoryGrouping {
 public:
  MemoryGrouping(const OpenedIndex& opened, bool parts, const MemoryMaker& memory, bool zeros,
                 std::span<const LoadTarget> targets, std::vector<MemoryGroup>& groups)
      : opened_(opened),
        parts_(parts),
        memory_(memory),
        zeros_(zeros),
        targets_(targets),
        groups_(groups) {}

  void run() {
    for (uint32_t i = 0; i < targets_.size(); ++i) {
      if (!needs_memory(i)) continue;
      MemoryGroup& group = wanted(i) >= kOwnMemoryNbytes ? add_group() : shared_group(i);
      const uint64_t at = place(i, group.nbytes);
      group.members.push_back({i, at, wanted(i)});
      group.nbytes = at + wanted(i);
    }
  }

 private:
  const format::IndexEntry& entry(size_t i) const { return opened_.index[targets_[i].entry]; }
  uint64_t wanted(size_t i) const {
    return parts_ ? targets_[i].runs.nbytes() : memory_nbytes(entry(i));
  }
  bool needs_memory(size_t i) const {
    return !targets_[i].in_place && wanted(i) > 0 && entry(i).zero_filled() == zeros_;
  }

  // The first place from `used` on, of memory that begins with a page, for target `i`.
  uint64_t place(size_t i, uint64_t used) const {
    const uint64_t in_page = (entry(i).data_offset + targets_[i].runs.offset) % kPageNbytes;
    const bool placed = memory_.as_in_file && !zeros_ && wanted(i) >= kPlacedNbytes;
    if (!placed || in_page % kElementAlignment != 0) return align_up(used, memory_.alignment);
    return align_up(used - std::min(used, in_page), kPageNbytes) + in_page;
  }

  MemoryGroup& add_group() { return groups_.emplace_back(MemoryGroup{0, zeros_, {}}); }

  // The one that small targets share now, if it has room for target `i`, else the next. It stays
  // open across large targets: a device takes milliseconds for each allocation.
  MemoryGroup& shared_group(uint32_t i) {
    if (shared_) {
      MemoryGroup& group = groups_[*shared_];
      if (place(i, group.nbytes) + wanted(i) <= kSharedNbytes) return group;
    }
    shared_ = groups_.size();
    return add_group();
  }

  const OpenedIndex& opened_;
  const bool parts_;
  const MemoryMaker& memory_;
  const bool zeros_;
  const std::span<const LoadTarget> targets_;
  std::vector<MemoryGroup>& groups_;
  std::optional<size_t> shared_;  // the number of a group
};

}  // namespace

MemoryMaker host_memory(const OpenedIndex& opened, const io::RangeSource& source) {
  const bool secret = opened.prologue.has_crypt_info();
  const auto make = [secret](uint64_t nbytes, bool zeros) -> TensorMemory {
    const auto arena = secret || zeros ? HostArena::create(nbytes) : HostArena::recycle(nbytes);
    return {arena->bytes().data(), nbytes, arena};
  };
  return {make, kHostAlignment, source.traits().direct && !secret};
}

std::vector<MemoryGroup> group_memory(const OpenedIndex& opened, bool parts,
                                      const MemoryMaker& memory,
                                      std::span<const LoadTarget> targets) {
  std::vector<MemoryGroup> groups;
  for (const bool zeros : {false, true})
    MemoryGrouping(opened, parts, memory, zeros, targets, groups).run();
  return groups;
}

void allocate(const MemoryGroup& group, const OpenedIndex& opened, const io::RangeSource& source,
              const MemoryMaker& memory, std::span<LoadTarget> targets) {
  TensorMemory made;
  try {
    made = memory.make(group.nbytes, group.zeros);
  } catch (const Error& error) {
    // If the size of the source is known, it has been compared with the size of the data.
    if (error.code() != Errc::out_of_memory || group.nbytes < kOwnMemoryNbytes ||
        (source.size() && !group.zeros))
      throw;
    const format::IndexEntry& entry = opened.index[targets[group.members.front().target].entry];
    throw Error(Errc::malformed,
                source.name() + ": tensor " + format::display_name(entry.name) + " claims " +
                    std::to_string(group.members.front().nbytes) + " bytes" +
                    (group.zeros ? " of zeros" : "") + ", more than memory can be",
                source.name());
  }
  for (const MemoryGroup::Member& member : group.members)
    targets[member.target].destination = {made.data + member.place, member.nbytes, made.owner};
}

}  // namespace tensorizer::load
