#include "crypto/kernels/fused_box.h"

#include <sodium.h>

#include <algorithm>

#include "core/wipe.h"

namespace tensorizer::crypto {
namespace {

// Input and output of a stretch together take half of a 32 KiB cache. A multiple of every batch of
// the keystreams.
constexpr size_t kStretchNbytes = 8192;

// Block 0 gives the MAC's key in its first half; its second half encrypts the first bytes of the
// message.
constexpr size_t kFirstNbytes = 32;

constexpr size_t kNonceStartNbytes = 16;  // goes into the subkey, the other 8 bytes into Salsa20

// Below this the powers of r cost more than the vectors save.
constexpr size_t kVectorNbytes = 512;

// One message being processed. Everything in here is secret, and wiped at the end.
class Box {
 public:
  Box(const BoxParts& parts, size_t nbytes, const uint8_t* nonce, const uint8_t* key) noexcept
      : parts_(parts), poly_blocks_(nbytes < kVectorNbytes ? &poly1305_blocks : parts.poly_blocks) {
    uint8_t subkey[32];
    hsalsa20(subkey, key, nonce);
    secret_.salsa = salsa20_state(subkey, nonce + kNonceStartNbytes);
    salsa20_block(secret_.block0, secret_.salsa, 0);
    poly1305_start(secret_.poly, secret_.block0);
    if (nbytes >= kVectorNbytes) poly1305_fill_powers(secret_.poly);
    wipe(subkey, sizeof subkey);
  }
  ~Box() { wipe(&secret_, sizeof secret_); }
  Box(const Box&) = delete;
  Box& operator=(const Box&) = delete;

  // The keystream of message bytes [offset, offset + nbytes). `offset` is 0 (then nbytes <= 32) or
  // 32 plus a multiple of 64.
  void crypt(uint8_t* out, const uint8_t* in, size_t offset, size_t nbytes) const noexcept {
    if (offset == 0) {
      const uint8_t* stream = secret_.block0 + kFirstNbytes;
      for (size_t i = 0; i < nbytes; ++i) out[i] = static_cast<uint8_t>(in[i] ^ stream[i]);
    } else {
      parts_.salsa_xor(out, in, nbytes, secret_.salsa,
                       1 + (offset - kFirstNbytes) / kSalsaBlockNbytes);
    }
  }

  // Ciphertext in order. Whole blocks only, except for the last piece.
  void absorb(const uint8_t* cipher, size_t nbytes) noexcept {
    poly_blocks_(secret_.poly, cipher, nbytes / kPolyBlockNbytes);
    rest_ = cipher + nbytes / kPolyBlockNbytes * kPolyBlockNbytes;
    rest_nbytes_ = nbytes % kPolyBlockNbytes;
  }

  // REQUIRES: the memory of the last piece absorbed is still there.
  void finish(uint8_t* mac) noexcept { poly1305_finish(secret_.poly, rest_, rest_nbytes_, mac); }

 private:
  struct Secret {
    SalsaState salsa;
    uint8_t block0[kSalsaBlockNbytes];
    Poly1305 poly;
  };

  const BoxParts& parts_;
  PolyBlocks poly_blocks_;
  const uint8_t* rest_ = nullptr;
  size_t rest_nbytes_ = 0;
  Secret secret_;
};

// Calls fn(offset, nbytes) for the first bytes and then for every stretch.
template <class Fn>
void for_each_stretch(size_t nbytes, Fn&& fn) {
  const size_t first = std::min(nbytes, kFirstNbytes);
  fn(size_t{0}, first);
  for (size_t at = first; at < nbytes; at += kStretchNbytes)
    fn(at, std::min(kStretchNbytes, nbytes - at));
}

bool fits(Box& box, const uint8_t* mac) noexcept {
  uint8_t computed[kPolyMacNbytes];
  box.finish(computed);
  const bool same = crypto_verify_16(computed, mac) == 0;
  wipe(computed, sizeof computed);  // the right MAC of a forgery is worth hiding
  return same;
}

}  // namespace

void fused_seal(const BoxParts& parts, uint8_t* cipher, uint8_t* mac, const uint8_t* plain,
                size_t nbytes, const uint8_t* nonce, const uint8_t* key) noexcept {
  Box box(parts, nbytes, nonce, key);
  for_each_stretch(nbytes, [&](size_t at, size_t n) {
    box.crypt(cipher + at, plain + at, at, n);
    box.absorb(cipher + at, n);
  });
  box.finish(mac);
}

bool fused_open(const BoxParts& parts, uint8_t* plain, const uint8_t* cipher, const uint8_t* mac,
                size_t nbytes, const uint8_t* nonce, const uint8_t* key) noexcept {
  Box box(parts, nbytes, nonce, key);
  if (plain == cipher) {  // the ciphertext must survive a refusal: MAC first, then a second pass
    for_each_stretch(nbytes, [&](size_t at, size_t n) { box.absorb(cipher + at, n); });
    if (!fits(box, mac)) return false;
    for_each_stretch(nbytes,
                     [&](size_t at, size_t n) { box.crypt(plain + at, cipher + at, at, n); });
    return true;
  }
  for_each_stretch(nbytes, [&](size_t at, size_t n) {
    box.absorb(cipher + at, n);
    box.crypt(plain + at, cipher + at, at, n);
  });
  return fits(box, mac);
}

}  // namespace tensorizer::crypto
