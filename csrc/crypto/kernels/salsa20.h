// Salsa20 and HSalsa20: the core in plain C++, and the interface of the vectorised keystreams.
// Pure.
//
// No branch and no address depends on the key, the nonce or the data; only lengths decide what is
// executed. Source: Bernstein, "The Salsa20 family of stream ciphers" and "Extending the Salsa20
// nonce".
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "core/wipe.h"

namespace tensorizer::crypto {

inline constexpr size_t kSalsaBlockNbytes = 64;

// The sixteen words that one block is made of; words 8 and 9 are the block counter.
using SalsaState = std::array<uint32_t, 16>;

// State of Salsa20 with this key (32 bytes) and nonce (8 bytes), at block 0.
SalsaState salsa20_state(const uint8_t* key, const uint8_t* nonce) noexcept;

// The 64 keystream bytes of block `counter`.
void salsa20_block(uint8_t* out, const SalsaState& state, uint64_t counter) noexcept;

// The subkey (32 bytes) that XSalsa20 takes from a key (32) and the first 16 bytes of its nonce.
void hsalsa20(uint8_t* subkey, const uint8_t* key, const uint8_t* nonce) noexcept;

// out = in XOR keystream from the start of block `counter` on. `out` and `in` are equal or
// disjoint, any alignment.
using SalsaXor = void (*)(uint8_t* out, const uint8_t* in, size_t nbytes, const SalsaState& state,
                          uint64_t counter) noexcept;

// The same by a function that does whole batches of blocks.
template <size_t kBlocks, auto kXorBatch>
void xor_in_batches(uint8_t* out, const uint8_t* in, size_t nbytes, const SalsaState& state,
                    uint64_t counter) noexcept {
  constexpr size_t kBatchNbytes = kBlocks * kSalsaBlockNbytes;
  for (; nbytes >= kBatchNbytes; nbytes -= kBatchNbytes) {
    kXorBatch(out, in, state, counter);
    out += kBatchNbytes;
    in += kBatchNbytes;
    counter += kBlocks;
  }
  if (nbytes == 0) return;
  alignas(64) uint8_t rest[kBatchNbytes] = {};
  std::memcpy(rest, in, nbytes);
  kXorBatch(rest, rest, state, counter);
  std::memcpy(out, rest, nbytes);
  wipe(rest, sizeof rest);
}

#if defined(__x86_64__)
// REQUIRES: AVX2; AVX-512F.
void salsa20_xor_avx2(uint8_t* out, const uint8_t* in, size_t nbytes, const SalsaState& state,
                      uint64_t counter) noexcept;
void salsa20_xor_avx512(uint8_t* out, const uint8_t* in, size_t nbytes, const SalsaState& state,
                        uint64_t counter) noexcept;
#elif defined(__aarch64__)
void salsa20_xor_neon(uint8_t* out, const uint8_t* in, size_t nbytes, const SalsaState& state,
                      uint64_t counter) noexcept;
#endif

}  // namespace tensorizer::crypto
