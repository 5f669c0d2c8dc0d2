// What a device needs to open chunks of an encrypted file: the only place that sees both the key
// and the kernels' descriptor.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <stop_token>
#include <vector>

#include "crypto/chunked_box.h"
#include "device/chunk_to_open.h"
#include "device/copy_engine.h"

namespace tensorizer::load {

// Whether kernels take a chunk of that size whose plaintext will lie at that address of the device.
bool device_opens(const std::byte* address, uint64_t nbytes) noexcept;

// Fills the descriptor of a chunk whose ciphertext will lie at `address`; its first segment is the
// caller's to count. What it holds opens this chunk alone; it is as secret as the chunk's
// plaintext: to be wiped when the device has read it. REQUIRES: device_opens().
void describe_chunk(device::ChunkToOpen& chunk, const std::byte* address, uint64_t nbytes,
                    std::span<const std::byte, crypto::kMacNbytes> mac, crypto::NonceView nonce,
                    const crypto::SecretKey& key) noexcept;

class PayloadCipher;

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
