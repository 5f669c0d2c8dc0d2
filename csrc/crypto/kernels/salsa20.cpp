#include "crypto/kernels/salsa20.h"

#include <bit>
#include <cstring>

#define INLINE inline

#include "crypto/kernels/salsa20_rounds.h"

namespace tensorizer::crypto {
namespace {

constexpr uint32_t kSigma[4] = {0x61707865, 0x3320646e, 0x79622d32,
                                0x6b206574};  // "expand 32-byte k"

struct One {
  using Word = uint32_t;
  static INLINE Word plus(Word a, Word b) { return a + b; }
  template <int kBits>
  static INLINE Word xor_rotated(Word word, Word sum) {
    return word ^ std::rotl(sum, kBits);
  }
};

uint32_t word(const uint8_t* from) noexcept {
  uint32_t value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

}  // namespace

SalsaState salsa20_state(const uint8_t* key, const uint8_t* nonce) noexcept {
  SalsaState state{};
  for (size_t i = 0; i < 4; ++i) {
    state[5 * i] = kSigma[i];
    state[1 + i] = word(key + 4 * i);
    state[11 + i] = word(key + 16 + 4 * i);
  }
  state[6] = word(nonce);
  state[7] = word(nonce + 4);
  return state;
}

void salsa20_block(uint8_t* out, const SalsaState& state, uint64_t counter) noexcept {
  SalsaState x = state;
  x[8] = static_cast<uint32_t>(counter);
  x[9] = static_cast<uint32_t>(counter >> 32);
  make_stream<One>(x.data());
  std::memcpy(out, x.data(), kSalsaBlockNbytes);
}

void hsalsa20(uint8_t* subkey, const uint8_t* key, const uint8_t* nonce) noexcept {
  SalsaState x = salsa20_state(key, nonce);
  x[8] = word(nonce + 8);
  x[9] = word(nonce + 12);
  run_rounds<One>(x.data());
  const uint32_t taken[8] = {x[0], x[5], x[10], x[15], x[6], x[7], x[8], x[9]};
  std::memcpy(subkey, taken, sizeof taken);
}

}  // namespace tensorizer::crypto
