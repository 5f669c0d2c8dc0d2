#include "crypto/kernels/poly1305.h"

#include <cstring>

namespace tensorizer::crypto {
namespace {

using u128 = unsigned __int128;

uint64_t word(const uint8_t* from) noexcept {
  uint64_t value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

Limbs multiply(const Limbs& a, const Limbs& b) noexcept {
  // 2^132 = 4 * 2^130, and 2^130 = 5: what overflows the three limbs comes back times 20.
  const uint64_t b1 = 20 * b[1], b2 = 20 * b[2];
  const u128 d0 = u128{a[0]} * b[0] + u128{a[1]} * b2 + u128{a[2]} * b1;
  u128 d1 = u128{a[0]} * b[1] + u128{a[1]} * b[0] + u128{a[2]} * b2;
  u128 d2 = u128{a[0]} * b[2] + u128{a[1]} * b[1] + u128{a[2]} * b[0];
  d1 += d0 >> 44;
  d2 += d1 >> 44;
  Limbs h{static_cast<uint64_t>(d0) & kMask44, static_cast<uint64_t>(d1) & kMask44,
          static_cast<uint64_t>(d2) & kMask42};
  h[0] += 5 * static_cast<uint64_t>(d2 >> 42);
  h[1] += h[0] >> 44;
  h[0] &= kMask44;
  return h;
}

// Adds a 128-bit block with `top` (0 or 1) above it and multiplies by r.
void absorb(Poly1305& state, const uint8_t* block, uint64_t top) noexcept {
  const uint64_t low = word(block), high = word(block + 8);
  state.h[0] += low & kMask44;
  state.h[1] += ((low >> 44) | (high << 20)) & kMask44;
  state.h[2] += (high >> 24) | (top << 40);
  state.h = multiply(state.h, state.r);
}

}  // namespace

Limbs poly1305_carried(const Limbs& limbs) noexcept {
  Limbs h = limbs;
  h[1] += h[0] >> 44;
  h[0] &= kMask44;
  h[2] += h[1] >> 44;
  h[1] &= kMask44;
  h[0] += 5 * (h[2] >> 42);
  h[2] &= kMask42;
  h[1] += h[0] >> 44;
  h[0] &= kMask44;
  return h;
}

Limbs26 poly1305_to_26(const Limbs& limbs) noexcept {
  const Limbs h = poly1305_carried(limbs);
  const u128 low = u128{h[0]} + (u128{h[1]} << 44);  // bits 0 to 88, and a carry of limb 1 if any
  const u128 high = (low >> 78) + (u128{h[2]} << 10);
  return {static_cast<uint64_t>(low) & kMask26, static_cast<uint64_t>(low >> 26) & kMask26,
          static_cast<uint64_t>(low >> 52) & kMask26, static_cast<uint64_t>(high) & kMask26,
          static_cast<uint64_t>(high >> 26)};
}

Limbs poly1305_from_26(const Limbs26& limbs) noexcept {
  u128 t = u128{limbs[0]} + (u128{limbs[1]} << 26) + (u128{limbs[2]} << 52);
  Limbs h;
  h[0] = static_cast<uint64_t>(t) & kMask44;
  t = (t >> 44) + (u128{limbs[3]} << 34) + (u128{limbs[4]} << 60);
  h[1] = static_cast<uint64_t>(t) & kMask44;
  h[2] = static_cast<uint64_t>(t >> 44);
  return poly1305_carried(h);
}

void poly1305_start(Poly1305& state, const uint8_t* key) noexcept {
  const uint64_t low = word(key), high = word(key + 8);
  state = Poly1305{};
  state.r = {low & 0xffc0fffffff, ((low >> 44) | (high << 20)) & 0xfffffc0ffff,
             (high >> 24) & 0x00ffffffc0f};
  state.pad = {word(key + 16), word(key + 24)};
}

void poly1305_fill_powers(Poly1305& state) noexcept {
  state.powers[0] = state.r;
  for (size_t i = 1; i < state.powers.size(); ++i) {
    state.powers[i] = poly1305_carried(multiply(state.powers[i - 1], state.r));
  }
  state.power16 = poly1305_carried(multiply(state.powers[7], state.powers[7]));
}

void poly1305_blocks(Poly1305& state, const uint8_t* data, size_t nblocks) noexcept {
  for (; nblocks != 0; --nblocks, data += kPolyBlockNbytes) absorb(state, data, 1);
}

void poly1305_finish(Poly1305& state, const uint8_t* rest, size_t nbytes, uint8_t* mac) noexcept {
  if (nbytes != 0) {
    uint8_t block[kPolyBlockNbytes] = {};
    std::memcpy(block, rest, nbytes);
    block[nbytes] = 1;
    absorb(state, block, 0);
  }
  // Twice, because the first may leave one bit above limb 1 that ripples to the top.
  const Limbs h = poly1305_carried(poly1305_carried(state.h));
  // g = h - p = h + 5 - 2^130; its sign selects, without a branch, which of the two is below p.
  Limbs g{h[0] + 5, h[1], h[2]};
  g[1] += g[0] >> 44;
  g[0] &= kMask44;
  g[2] += g[1] >> 44;
  g[1] &= kMask44;
  g[2] -= uint64_t{1} << 42;
  const uint64_t take_h = uint64_t{0} - (g[2] >> 63);
  Limbs t;
  for (size_t i = 0; i < t.size(); ++i) t[i] = (h[i] & take_h) | (g[i] & ~take_h);
  const u128 low = u128{t[0] | (t[1] << 44)} + state.pad[0];
  const u128 high = u128{(t[1] >> 20) | (t[2] << 24)} + state.pad[1] + (low >> 64);
  const uint64_t words[2] = {static_cast<uint64_t>(low), static_cast<uint64_t>(high)};
  std::memcpy(mac, words, sizeof words);
}

}  // namespace tensorizer::crypto
