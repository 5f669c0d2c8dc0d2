#include "load/payload_cipher.h"

#include <algorithm>
#include <string>

#include "core/error.h"
#include "crypto/chunked_box.h"
#include "load/accept_record.h"
#include "load/device_cipher.h"

namespace tensorizer::load {

struct PayloadCipher::Target {
  std::shared_ptr<const crypto::SecretKey> key;
  uint64_t chunk_nbytes = 0;
  format::Nonce nonce{};
  std::vector<std::byte> macs;
  bool straddles = false;
};

PayloadCipher::PayloadCipher(const OpenedIndex& opened, KeyRing& keys, size_t targets)
    : targets_(targets), opened_(opened), keys_(keys) {}
PayloadCipher::~PayloadCipher() = default;

void PayloadCipher::accept(uint32_t target, const format::RecordHeader& header, uint32_t steps) {
  const uint64_t chunk = format::check_crypt_info(*header.crypt, header.data_nbytes);
  if (header.data_nbytes == 0) return;
  auto state = std::make_unique<Target>();
  state->chunk_nbytes = chunk;
  state->key = key_of(opened_, keys_, *header.crypt);
  state->nonce = header.crypt->cipher->nonce;
  state->macs.assign(header.crypt->cipher->macs.begin(), header.crypt->cipher->macs.end());
  // Pieces are cut at multiples of the usual chunk.
  state->straddles = steps > 1 && (header.data_nbytes <= chunk || kCipherChunkNbytes % chunk != 0);
  targets_[target] = std::move(state);
}

uint64_t PayloadCipher::chunk_nbytes(uint32_t target) const noexcept {
  return targets_[target] ? targets_[target]->chunk_nbytes : 0;
}

bool PayloadCipher::straddles(uint32_t target) const noexcept {
  return targets_[target] && targets_[target]->straddles;
}

void PayloadCipher::open(uint32_t target, uint64_t offset, std::span<const std::byte> cipher,
                         std::byte* plain, const std::stop_token& stop) const {
  const Target& state = *targets_[target];
  const std::span<const std::byte> macs(state.macs);
  uint64_t chunk = offset / state.chunk_nbytes;
  for (uint64_t done = 0; done < cipher.size(); ++chunk) {
    const uint64_t n = std::min<uint64_t>(state.chunk_nbytes, cipher.size() - done);
    const auto nonce = crypto::nonce_plus(crypto::NonceView(state.nonce), chunk);
    const auto mac = macs.subspan(chunk * kMacNbytes).first<kMacNbytes>();
    if (!crypto::open({plain + done, n}, cipher.subspan(done, n), mac, nonce, *state.key))
      refuse(target, chunk);
    done += n;
    throw_if_stopped(stop);
  }
}

size_t PayloadCipher::chunks_for_device(uint32_t target, uint64_t nbytes,
                                        uint64_t address) const noexcept {
  const uint64_t chunk_nbytes = targets_[target]->chunk_nbytes;
  size_t count = 0;
  for (uint64_t done = 0; done < nbytes; done += chunk_nbytes, ++count) {
    if (!device_opens(address + done, std::min(chunk_nbytes, nbytes - done))) return 0;
  }
  return count;
}

void PayloadCipher::describe(uint32_t target, uint64_t offset, uint64_t nbytes,
                             const std::byte* address,
                             std::span<device::ChunkToOpen> room) const noexcept {
  const Target& state = *targets_[target];
  uint64_t chunk = offset / state.chunk_nbytes;
  size_t i = 0;
  for (uint64_t done = 0; done < nbytes; done += state.chunk_nbytes, ++chunk) {
    const auto mac =
        std::span<const std::byte>(state.macs).subspan(chunk * kMacNbytes).first<kMacNbytes>();
    const auto nonce = crypto::nonce_plus(crypto::NonceView(state.nonce), chunk);
    describe_chunk(room[i++], address + done, std::min(state.chunk_nbytes, nbytes - done), mac,
                   nonce, *state.key);
  }
}

void PayloadCipher::refuse(uint32_t target, uint64_t chunk) const {
  const uint64_t total = std::max<uint64_t>(targets_[target]->macs.size() / kMacNbytes, 1);
  throw Error(Errc::crypto, "chunk " + std::to_string(chunk + 1) + " of " + std::to_string(total) +
                                " does not match its authentication code: wrong key, or the file "
                                "was altered");
}

}  // namespace tensorizer::load
