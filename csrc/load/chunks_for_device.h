// Which encrypted chunks a worker leaves to the device: described while a buffer of its lane is
// filled, sent with the buffer. Confined to the worker's thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <stop_token>
#include <vector>

#include "device/copy_engine.h"
#include "load/payload_cipher.h"

namespace tensorizer::load {

// The chunks of the buffer at hand of a worker's lane that the device will open.
class ChunksForDevice {
 public:
  // True where the device will open the piece: its ciphertext is to be sent to `address`, with the
  // next send(). False where the host is to: the lane's device opens nothing, or not these chunks.
  bool add(device::Lane& lane, const PayloadCipher& cipher, uint32_t target, uint64_t offset,
           uint64_t nbytes, const std::byte* address);

  // Sends the pieces of the buffer and what add() was told of. `refuse` is called by a later
  // wait() or finish() of the lane, with the target and the chunk that is not genuine, and throws.
  void send(device::Lane& lane, std::span<const device::CopyPiece> pieces,
            std::function<void(uint32_t target, uint64_t chunk)> refuse,
            const std::stop_token& stop);

 private:
  struct Origin {
    uint32_t target;
    uint64_t chunk;
  };
  std::vector<Origin> origins_;  // of the chunks in the lane's table
};

}  // namespace tensorizer::load
