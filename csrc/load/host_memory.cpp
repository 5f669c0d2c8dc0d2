#include "load/host_memory.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "core/checked_math.h"
#include "core/error.h"
#include "device/host_arena.h"
#include "format/tensor_path.h"

namespace tensorizer::load {
namespace {

using device::HostArena;

constexpr uint64_t kOwnPagesNbytes = uint64_t{8} << 20;
constexpr uint64_t kArenaNbytes = uint64_t{16} << 20;
constexpr uint64_t kTensorAlignment = 64;

class Allocator {
 public:
  Allocator(const OpenedIndex& opened, bool sized, std::span<LoadTarget> targets)
      : opened_(opened), sized_(sized), targets_(targets) {}

  void run() {
    for (size_t i = 0; i < targets_.size();) {
      if (!needs_memory(i)) {
        ++i;
      } else if (wanted(i) >= kOwnPagesNbytes) {
        assign(i, own_arena(i), 0);
        ++i;
      } else {
        i = share_arena(i);
      }
    }
  }

 private:
  const format::IndexEntry& entry(size_t i) const { return opened_.index[targets_[i].entry]; }
  // Surplus bytes of old files included.
  uint64_t wanted(size_t i) const { return std::max(entry(i).data_nbytes, entry(i).loaded_nbytes); }
  bool needs_memory(size_t i) const { return !targets_[i].in_place && wanted(i) > 0; }

  std::shared_ptr<HostArena> arena(uint64_t nbytes) const {
    return opened_.prologue.has_crypt_info() ? HostArena::create(nbytes)
                                             : HostArena::recycle(nbytes);
  }

  void assign(size_t i, const std::shared_ptr<HostArena>& arena, uint64_t at) {
    targets_[i].destination = {arena->bytes().data() + at, wanted(i), arena};
  }

  std::shared_ptr<HostArena> own_arena(size_t i) const {
    try {
      return entry(i).zero_filled() ? HostArena::create(wanted(i)) : arena(wanted(i));
    } catch (const Error& error) {
      // What the source's size vouches for is honest; the rest is only claimed.
      if (error.code() != Errc::out_of_memory || (sized_ && !entry(i).zero_filled())) throw;
      throw Error(Errc::malformed, "tensor " + format::display_name(entry(i).name) + " claims " +
                                       std::to_string(wanted(i)) + " bytes" +
                                       (entry(i).zero_filled() ? " of zeros" : "") +
                                       ", more than memory can be");
    }
  }

  // An arena for target `first` and the small ones behind it; the number of the first that is not
  // in it.
  size_t share_arena(size_t first) {
    std::vector<std::pair<size_t, uint64_t>> group;  // target, position in the arena
    uint64_t used = 0;
    size_t i = first;
    for (; i < targets_.size() && wanted(i) < kOwnPagesNbytes; ++i) {
      if (!needs_memory(i)) continue;
      const uint64_t at = align_up(used, kTensorAlignment);
      if (at + wanted(i) > kArenaNbytes) break;
      group.emplace_back(i, at);
      used = at + wanted(i);
    }
    const auto shared = arena(used);
    for (const auto& [target, at] : group) {
      assign(target, shared, at);
      if (shared->recycled() && entry(target).zero_filled())
        std::memset(targets_[target].destination.data, 0, wanted(target));
    }
    return i;
  }

  const OpenedIndex& opened_;
  const bool sized_;
  const std::span<LoadTarget> targets_;
};

}  // namespace

void allocate_on_host(const OpenedIndex& opened, bool sized, std::span<LoadTarget> targets) {
  Allocator(opened, sized, targets).run();
}

}  // namespace tensorizer::load
