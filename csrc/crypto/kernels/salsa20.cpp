#include "crypto/kernels/salsa20.h"

#include <bit>
#include <cstring>

namespace tensorizer::crypto {
namespace {

constexpr uint32_t kSigma[4] = {0x61707865, 0x3320646e, 0x79622d32,
                                0x6b206574};  // "expand 32-byte k"
constexpr int kDoubleRounds = 10;

uint32_t word(const uint8_t* from) noexcept {
  uint32_t value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

void quarter_round(uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d) noexcept {
  b ^= std::rotl(a + d, 7);
  c ^= std::rotl(b + a, 9);
  d ^= std::rotl(c + b, 13);
  a ^= std::rotl(d + c, 18);
}

void run_rounds(SalsaState& x) noexcept {
  for (int i = 0; i < kDoubleRounds; ++i) {
    quarter_round(x[0], x[4], x[8], x[12]);
    quarter_round(x[5], x[9], x[13], x[1]);
    quarter_round(x[10], x[14], x[2], x[6]);
    quarter_round(x[15], x[3], x[7], x[11]);
    quarter_round(x[0], x[1], x[2], x[3]);
    quarter_round(x[5], x[6], x[7], x[4]);
    quarter_round(x[10], x[11], x[8], x[9]);
    quarter_round(x[15], x[12], x[13], x[14]);
  }
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
  SalsaState start = state;
  start[8] = static_cast<uint32_t>(counter);
  start[9] = static_cast<uint32_t>(counter >> 32);
  SalsaState x = start;
  run_rounds(x);
  for (size_t i = 0; i < x.size(); ++i) x[i] += start[i];
  std::memcpy(out, x.data(), kSalsaBlockNbytes);
}

void hsalsa20(uint8_t* subkey, const uint8_t* key, const uint8_t* nonce) noexcept {
  SalsaState x = salsa20_state(key, nonce);
  x[8] = word(nonce + 8);
  x[9] = word(nonce + 12);
  run_rounds(x);
  const uint32_t taken[8] = {x[0], x[5], x[10], x[15], x[6], x[7], x[8], x[9]};
  std::memcpy(subkey, taken, sizeof taken);
}

}  // namespace tensorizer::crypto
