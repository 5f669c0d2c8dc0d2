// Differential: every kernel of this processor and libsodium must agree on ciphertext, MAC and
// plaintext, and refuse the same forgeries. The input is key, nonce, two alignments, the index of a
// bit to flip, and the message.
#include <sodium.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "crypto/kernels/box_kernel.h"
#include "crypto_oracle.h"

namespace {

using tensorizer::crypto::BoxKernel;
using tensorizer::crypto::testing::Placed;

void require(bool condition) {
  if (!condition) __builtin_trap();
}

struct Input {
  uint8_t key[32] = {}, nonce[24] = {};
  uint8_t in_at = 0, out_at = 0, repeat = 0, reserved = 0;
  uint32_t flip = 0;
};

void check(const BoxKernel& kernel, const Input& input, const std::vector<uint8_t>& plain,
           const std::vector<uint8_t>& cipher, const uint8_t* mac) {
  const size_t n = plain.size();
  const Placed from(plain, input.in_at), to(n, input.out_at), back(n, input.in_at);
  uint8_t found[16];
  kernel.seal(to.data(), found, from.data(), n, input.nonce, input.key);
  require(to.holds(cipher) && to.canaries_live() && std::memcmp(found, mac, sizeof found) == 0);
  require(kernel.open(back.data(), to.data(), mac, n, input.nonce, input.key));
  require(back.holds(plain) && back.canaries_live());
  require(kernel.open(to.data(), to.data(), mac, n, input.nonce, input.key) && to.holds(plain));

  const size_t bit = input.flip % (8 * (n + sizeof found));
  const auto mask = static_cast<uint8_t>(1 << (bit % 8));
  const Placed forged(cipher, input.out_at);
  if (bit / 8 < n) {
    forged.data()[bit / 8] ^= mask;
  } else {
    found[bit / 8 - n] ^= mask;
  }
  require(!kernel.open(back.data(), forged.data(), found, n, input.nonce, input.key));
  require(back.canaries_live());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t nbytes) {
  Input input;
  if (nbytes < sizeof input) return 0;
  std::memcpy(&input, data, sizeof input);
  // Repeating the tail reaches lengths of many steps without inputs of that size.
  const std::vector<uint8_t> tail(data + sizeof input, data + nbytes);
  std::vector<uint8_t> plain;
  plain.reserve(tail.size() * (1 + input.repeat) + 1);
  for (int i = 0; i <= input.repeat; ++i) plain.insert(plain.end(), tail.begin(), tail.end());
  std::vector<uint8_t> cipher(plain.size());
  cipher.reserve(1);
  uint8_t mac[16];
  crypto_secretbox_detached(cipher.data(), mac, plain.data(), plain.size(), input.nonce, input.key);
  for (const BoxKernel* kernel : tensorizer::crypto::compiled_kernels()) {
    if (kernel->usable()) check(*kernel, input, plain, cipher, mac);
  }
  return 0;
}
