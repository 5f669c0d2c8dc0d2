#include "load/allocate.h"

#include <algorithm>
#include <string>
#include <vector>

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

// Serves the targets with data, or those without.
class Allocator {
 public:
  Allocator(const OpenedIndex& opened, bool sized, bool parts, const MemoryMaker& memory,
            bool zeros, std::span<LoadTarget> targets)
      : opened_(opened),
        sized_(sized),
        parts_(parts),
        memory_(memory),
        zeros_(zeros),
        targets_(targets) {}

  void run() {
    for (size_t i = 0; i < targets_.size();) {
      if (!needs_memory(i)) {
        ++i;
      } else if (wanted(i) >= kOwnMemoryNbytes) {
        targets_[i].destination = own_memory(i);
        ++i;
      } else {
        i = share_memory(i);
      }
    }
  }

 private:
  const format::IndexEntry& entry(size_t i) const { return opened_.index[targets_[i].entry]; }
  // Surplus bytes of old files included.
  uint64_t wanted(size_t i) const {
    if (parts_) return targets_[i].runs.nbytes();
    return std::max(entry(i).data_nbytes, entry(i).loaded_nbytes);
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

  TensorMemory own_memory(size_t i) const {
    const uint64_t at = place(i, 0);
    try {
      const TensorMemory memory = memory_.make(at + wanted(i), zeros_);
      return {memory.data + at, wanted(i), memory.owner};
    } catch (const Error& error) {
      // What the source's size vouches for is honest; the rest is only claimed.
      if (error.code() != Errc::out_of_memory || (sized_ && !zeros_)) throw;
      throw Error(Errc::malformed, "tensor " + format::display_name(entry(i).name) + " claims " +
                                       std::to_string(wanted(i)) + " bytes" +
                                       (zeros_ ? " of zeros" : "") + ", more than memory can be");
    }
  }

  // Memory for target `first` and the small ones behind it; the number of the first that is not in
  // it.
  size_t share_memory(size_t first) {
    std::vector<std::pair<size_t, uint64_t>> group;  // target, its place
    uint64_t used = 0;
    size_t i = first;
    for (; i < targets_.size(); ++i) {
      if (!needs_memory(i)) continue;
      const uint64_t at = place(i, used);
      if (wanted(i) >= kOwnMemoryNbytes || at + wanted(i) > kSharedNbytes) break;
      group.emplace_back(i, at);
      used = at + wanted(i);
    }
    const TensorMemory shared = memory_.make(used, zeros_);
    for (const auto& [target, at] : group)
      targets_[target].destination = {shared.data + at, wanted(target), shared.owner};
    return i;
  }

  const OpenedIndex& opened_;
  const bool sized_, parts_;
  const MemoryMaker& memory_;
  const bool zeros_;
  const std::span<LoadTarget> targets_;
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

void allocate(const OpenedIndex& opened, bool sized, bool parts, const MemoryMaker& memory,
              std::span<LoadTarget> targets) {
  for (const bool zeros : {false, true})
    Allocator(opened, sized, parts, memory, zeros, targets).run();
}

}  // namespace tensorizer::load
