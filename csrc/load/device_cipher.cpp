#include "load/device_cipher.h"

#include <cstring>

#include "core/wipe.h"
#include "crypto/kernels/salsa20.h"
#include "device/cuda/kernels/secretbox.h"

namespace tensorizer::load {
namespace {

namespace cuda = device::cuda;

constexpr uint64_t kLeastNbytes = 64 * 1024;  // below it a descriptor costs as much as the cipher
constexpr uint64_t kMostNbytes = uint64_t{device::kMaxSegments} * device::kSegmentNbytes;

}  // namespace

bool device_opens(uint64_t address, uint64_t nbytes) noexcept {
  return nbytes >= kLeastNbytes && nbytes <= kMostNbytes && address % cuda::kPolyBlockNbytes == 0;
}

void describe_chunk(device::ChunkToOpen& chunk, const std::byte* address, uint64_t nbytes,
                    std::span<const std::byte, kMacNbytes> mac, crypto::NonceView nonce,
                    const crypto::SecretKey& key) noexcept {
  const auto* const nonce_bytes = reinterpret_cast<const uint8_t*>(nonce.data());
  uint8_t subkey[sizeof chunk.subkey];
  crypto::hsalsa20(subkey, reinterpret_cast<const uint8_t*>(key.bytes().data()), nonce_bytes);
  crypto::SalsaState state = crypto::salsa20_state(subkey, nonce_bytes + 16);
  uint8_t block[crypto::kSalsaBlockNbytes];
  crypto::salsa20_block(block, state, 0);
  cuda::Words r;
  std::memcpy(&r, block, sizeof r);
  constexpr cuda::Words kClamp{{0x0fffffff, 0x0ffffffc, 0x0ffffffc, 0x0ffffffc}};
  for (int i = 0; i < 4; ++i) r.word[i] &= kClamp.word[i];

  chunk = {};
  chunk.address = reinterpret_cast<uintptr_t>(address);
  chunk.nbytes = nbytes;
  chunk.segments =
      static_cast<uint32_t>((nbytes + device::kSegmentNbytes - 1) / device::kSegmentNbytes);
  std::memcpy(chunk.subkey, subkey, sizeof subkey);
  std::memcpy(chunk.nonce, nonce_bytes + 16, sizeof chunk.nonce);
  std::memcpy(chunk.pad, block + 16, sizeof chunk.pad);
  std::memcpy(chunk.mac, mac.data(), sizeof chunk.mac);
  cuda::fill_powers(chunk, r);
  wipe(subkey, sizeof subkey);
  wipe(block, sizeof block);
  wipe(&state, sizeof state);
  wipe(&r, sizeof r);
}

}  // namespace tensorizer::load
