#include "load/chunks_for_device.h"

#include <utility>

namespace tensorizer::load {

bool ChunksForDevice::add(device::Lane& lane, const PayloadCipher& cipher, uint32_t target,
                          uint64_t offset, uint64_t nbytes, const std::byte* address) {
  const std::span<device::ChunkToOpen> table = lane.chunks_to_open();
  if (table.empty()) return false;
  const size_t count =
      cipher.describe(target, offset, nbytes, address, table.subspan(origins_.size()));
  const uint64_t first = count > 0 ? offset / cipher.chunk_nbytes(target) : 0;
  for (size_t i = 0; i < count; ++i) origins_.push_back({target, first + i});
  return count > 0;
}

void ChunksForDevice::send(device::Lane& lane, std::span<const device::CopyPiece> pieces,
                           std::function<void(uint32_t target, uint64_t chunk)> refuse,
                           const std::stop_token& stop) {
  if (origins_.empty()) return lane.send(pieces, stop);
  std::vector<Origin> origins = std::exchange(origins_, {});
  const size_t count = origins.size();
  lane.send_sealed(
      pieces, count,
      [origins = std::move(origins), refuse = std::move(refuse)](size_t i) {
        refuse(origins[i].target, origins[i].chunk);
      },
      stop);
}

}  // namespace tensorizer::load
