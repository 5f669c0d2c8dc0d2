// What a device needs to open chunks of an encrypted file: the only place that sees both the key
// and the kernels' descriptor.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "crypto/chunked_box.h"
#include "device/chunk_to_open.h"

namespace tensorizer::load {

// Whether kernels take a chunk of that size whose plaintext will lie at that address of the device.
bool device_opens(uint64_t address, uint64_t nbytes) noexcept;

// Fills the descriptor of a chunk whose ciphertext will lie at `address`; its first segment is the
// caller's to count. What it holds opens this chunk alone; it is as secret as the chunk's
// plaintext: to be wiped when the device has read it. REQUIRES: device_opens().
void describe_chunk(device::ChunkToOpen& chunk, const std::byte* address, uint64_t nbytes,
                    std::span<const std::byte, kMacNbytes> mac, crypto::NonceView nonce,
                    const crypto::SecretKey& key) noexcept;

}  // namespace tensorizer::load
