// XSalsa20-Poly1305 of many chunks in place: one kernel reads the ciphertext and computes, another
// compares the MACs and decrypts where they are right.
//
// Ciphertext that is not genuine stays as it is: no plaintext exists before its MAC was right.
// No branch and no address depends on a key, a sum or the data; lengths, and whether a chunk is
// genuine, decide what is executed.
//
// Numbers modulo 2^130 - 5 are five limbs of 26 bits. Bounds, asserted on the host:
// - Powers are fully reduced by the host: limbs below 2^26.
// - A product's limbs are below 2^26 but for limb 1, which is below 2^26 + 2^9 (see multiply()).
// - A message block's limbs are below 2^26. So a thread's sum stays below 2^27 + 2^9.
// - A step of the tree adds a sum that it does not multiply, so each of the eight steps adds up to
//   2^26 + 2^9: after the last one a limb is below 10 * (2^26 + 2^9), less than 2^30.
// - Five products of limbs below 2^30 and 5 * 2^26 add up to less than 21 * 2^56 < 2^61 (of the
//   factors only four have the 5), and the carry of at most 2^35 fits beside them.
// - Sums of 32 segments have limbs below 2^31 + 2^14, which 32 bits hold.
// Sources: Bernstein, "The Poly1305-AES message-authentication code", "The Salsa20 family of stream
// ciphers" and "Extending the Salsa20 nonce".
#pragma once

#include "device/chunk_to_open.h"
#include "device/cuda/kernels/shim.h"

namespace tensorizer::device::cuda {

inline constexpr uint32_t kLimbMask = (1u << 26) - 1;
inline constexpr uint32_t kPolyBlockNbytes = 16;
inline constexpr uint32_t kSegmentBlocks = kSegmentNbytes / kPolyBlockNbytes;
inline constexpr uint32_t kSegmentBlocksLog2 = 13;
inline constexpr uint32_t kSalsaBlockNbytes = 64;
inline constexpr uint32_t kSegmentSalsaBlocks = kSegmentNbytes / kSalsaBlockNbytes;
static_assert(kSegmentBlocks == 1u << kSegmentBlocksLog2);
static_assert(kSegmentBlocksLog2 + 5 == kPowers && kMaxSegments == 1u << 5);

struct Limbs {
  uint32_t limb[5];
};

TENSORIZER_KERNEL Limbs limbs_of(const uint32_t (&power)[5]) {
  return {{power[0], power[1], power[2], power[3], power[4]}};
}

TENSORIZER_KERNEL uint64_t wide(uint32_t a, uint32_t b) { return static_cast<uint64_t>(a) * b; }

// h * p modulo 2^130 - 5. REQUIRES: limbs of h below 2^30, of p below 2^26.
TENSORIZER_KERNEL Limbs multiply(const Limbs& h, const Limbs& p) {
  for (int i = 0; i < 5; ++i)
    TENSORIZER_KERNEL_ASSERT(h.limb[i] >> 30 == 0 && p.limb[i] >> 26 == 0);
  const uint32_t (&a)[5] = h.limb;
  const uint32_t (&b)[5] = p.limb;
  const uint32_t s1 = 5 * b[1];
  const uint32_t s2 = 5 * b[2];
  const uint32_t s3 = 5 * b[3];
  const uint32_t s4 = 5 * b[4];
  uint64_t d0 =
      wide(a[0], b[0]) + wide(a[1], s4) + wide(a[2], s3) + wide(a[3], s2) + wide(a[4], s1);
  uint64_t d1 =
      wide(a[0], b[1]) + wide(a[1], b[0]) + wide(a[2], s4) + wide(a[3], s3) + wide(a[4], s2);
  uint64_t d2 =
      wide(a[0], b[2]) + wide(a[1], b[1]) + wide(a[2], b[0]) + wide(a[3], s4) + wide(a[4], s3);
  uint64_t d3 =
      wide(a[0], b[3]) + wide(a[1], b[2]) + wide(a[2], b[1]) + wide(a[3], b[0]) + wide(a[4], s4);
  uint64_t d4 =
      wide(a[0], b[4]) + wide(a[1], b[3]) + wide(a[2], b[2]) + wide(a[3], b[1]) + wide(a[4], b[0]);
  d1 += d0 >> 26;
  d2 += d1 >> 26;
  d3 += d2 >> 26;
  d4 += d3 >> 26;
  // Up to 2^33 * 5, so 64 bits; what is left for limb 1 is below 2^9.
  const uint64_t low = (d0 & kLimbMask) + 5 * (d4 >> 26);
  TENSORIZER_KERNEL_ASSERT(d4 >> 61 == 0 && low >> 35 == 0);
  return {{static_cast<uint32_t>(low) & kLimbMask,
           (static_cast<uint32_t>(d1) & kLimbMask) + static_cast<uint32_t>(low >> 26),
           static_cast<uint32_t>(d2) & kLimbMask, static_cast<uint32_t>(d3) & kLimbMask,
           static_cast<uint32_t>(d4) & kLimbMask}};
}

TENSORIZER_KERNEL Limbs plus(const Limbs& a, const Limbs& b) {
  return {{a.limb[0] + b.limb[0], a.limb[1] + b.limb[1], a.limb[2] + b.limb[2],
           a.limb[3] + b.limb[3], a.limb[4] + b.limb[4]}};
}

// The one number from 0 to 2^130 - 6, in limbs below 2^26. Takes limbs of 32 bits.
TENSORIZER_KERNEL Limbs reduced(const Limbs& h) {
  uint32_t limb[5];
  uint64_t carry = 0;
  for (int i = 0; i < 5; ++i) {
    carry += h.limb[i];
    limb[i] = static_cast<uint32_t>(carry) & kLimbMask;
    carry >>= 26;
  }
  // The first round may leave a carry into limb 0 that goes through all of them; two rounds do not.
  for (int round = 0; round < 2; ++round) {
    carry *= 5;
    for (int i = 0; i < 5; ++i) {
      carry += limb[i];
      limb[i] = static_cast<uint32_t>(carry) & kLimbMask;
      carry >>= 26;
    }
  }
  TENSORIZER_KERNEL_ASSERT(carry == 0);
  // h + 5 reaches 2^130 just where h is 2^130 - 5 or more; then h - (2^130 - 5) is its low part.
  uint32_t less[5];
  uint32_t over = 5;
  for (int i = 0; i < 5; ++i) {
    over += limb[i];
    less[i] = over & kLimbMask;
    over >>= 26;
  }
  const uint32_t take = 0u - over;
  Limbs result;
  for (int i = 0; i < 5; ++i) result.limb[i] = (less[i] & take) | (limb[i] & ~take);
  return result;
}

// The value of 16 bytes, with `mark` as bits 128 and up.
TENSORIZER_KERNEL Limbs block_value(const Words& words, uint32_t mark) {
  const uint32_t (&w)[4] = words.word;
  return {{w[0] & kLimbMask, ((w[0] >> 26) | (w[1] << 6)) & kLimbMask,
           ((w[1] >> 20) | (w[2] << 12)) & kLimbMask, ((w[2] >> 14) | (w[3] << 18)) & kLimbMask,
           (w[3] >> 8) | (mark << 24)}};
}

// The powers of r that the kernels multiply with, squared again and again. For the host.
TENSORIZER_KERNEL void fill_powers(ChunkToOpen& chunk, const Words& r) {
  Limbs power = block_value(r, 0);
  for (uint32_t (&stored)[5] : chunk.power) {
    for (int i = 0; i < 5; ++i) stored[i] = power.limb[i];
    power = reduced(multiply(power, power));
  }
}

// The last block where it is short: its bytes and then a 1. Every index is a constant, since an
// array that is indexed at run time is in memory on the device.
TENSORIZER_KERNEL Limbs short_block_value(const unsigned char* from, uint32_t nbytes) {
  Words words = {{0, 0, 0, 0}};
#if defined(__CUDACC__)
#pragma unroll
#endif
  for (uint32_t i = 0; i < 15; ++i) {
    if (i < nbytes) words.word[i / 4] |= static_cast<uint32_t>(from[i]) << (8 * (i % 4));
  }
#if defined(__CUDACC__)
#pragma unroll
#endif
  for (uint32_t i = 0; i < 16; ++i) {
    if (i == nbytes) words.word[i / 4] |= 1u << (8 * (i % 4));
  }
  return block_value(words, 0);
}

struct MacShared {
  uint32_t sums[5][kThreads];  // limb by limb: neighbours are in neighbouring banks
};

TENSORIZER_KERNEL Limbs load_sum(const MacShared& shared, uint32_t t) {
  return {{shared.sums[0][t], shared.sums[1][t], shared.sums[2][t], shared.sums[3][t],
           shared.sums[4][t]}};
}

TENSORIZER_KERNEL void store_sum(MacShared& shared, uint32_t t, const Limbs& sum) {
  for (int i = 0; i < 5; ++i) shared.sums[i][t] = sum.limb[i];
}

// A thread's share of a segment: every 256th block, from block t on. A chunk is preceded by blocks
// of zeros that add nothing, so that each of its segments is full.
TENSORIZER_KERNEL Limbs sum_of_thread(const ChunkToOpen& chunk, uint32_t segment, uint32_t t) {
  const unsigned char* const data = pointer_to(chunk.address);
  const uint32_t nbytes = static_cast<uint32_t>(chunk.nbytes);
  const uint32_t blocks = (nbytes + kPolyBlockNbytes - 1) / kPolyBlockNbytes;
  const uint32_t zeros = chunk.segments * kSegmentBlocks - blocks;
  const Limbs step = limbs_of(chunk.power[8]);  // r^256
  Limbs sum = {{0, 0, 0, 0, 0}};
  const uint32_t first = segment * kSegmentBlocks + t;
  for (uint32_t at = first; at < first + kSegmentBlocks; at += kThreads) {
    if (at < zeros) continue;
    const uint32_t offset = (at - zeros) * kPolyBlockNbytes;
    const uint32_t left = nbytes - offset;
    const Limbs value = left >= kPolyBlockNbytes ? block_value(load_words(data + offset), 1)
                                                 : short_block_value(data + offset, left);
    sum = plus(multiply(sum, step), value);
  }
  return sum;
}

// r^(2^13 * (segments behind this one)) * r, times the sum of the segment's blocks.
TENSORIZER_KERNEL Limbs in_its_place(const ChunkToOpen& chunk, uint32_t segment, Limbs sum) {
  const uint32_t behind = chunk.segments - 1 - segment;
  for (uint32_t bit = 0; bit < kPowers - kSegmentBlocksLog2; ++bit) {
    if ((behind >> bit) & 1) sum = multiply(sum, limbs_of(chunk.power[kSegmentBlocksLog2 + bit]));
  }
  return multiply(sum, limbs_of(chunk.power[0]));
}

// One thread block for each segment of each chunk: writes its share of the chunk's polynomial to
// partial[segment]. `chunk_of` names the chunk of each thread block.
template <class Block>
TENSORIZER_KERNEL void mac_kernel(Block& block, MacShared& shared, const ChunkToOpen* chunks,
                                  const uint32_t* chunk_of, uint32_t* partial) {
  const ChunkToOpen& chunk = chunks[chunk_of[block.index()]];
  const uint32_t segment = block.index() - chunk.first_segment;
  block.each([&](uint32_t t) { store_sum(shared, t, sum_of_thread(chunk, segment, t)); });
  block.sync();
  // Thread t stands 128, 64, … 1 blocks before the one that it is added to.
  for (uint32_t level = 8; level-- > 0;) {
    const uint32_t half = 1u << level;
    block.each([&](uint32_t t) {
      if (t >= half) return;
      const Limbs moved = multiply(load_sum(shared, t), limbs_of(chunk.power[level]));
      store_sum(shared, t, plus(moved, load_sum(shared, t + half)));
    });
    block.sync();
  }
  block.each([&](uint32_t t) {
    if (t == 0) {
      const Limbs share = in_its_place(chunk, segment, load_sum(shared, 0));
      for (uint32_t i = 0; i < kPartialWords; ++i)
        partial[kPartialWords * block.index() + i] = share.limb[i];
    }
    // What follows from the key stays in no memory that another kernel might be given.
    store_sum(shared, t, {{0, 0, 0, 0, 0}});
  });
}

// The MAC that the chunk's shares add up to.
TENSORIZER_KERNEL Words mac_of(const ChunkToOpen& chunk, const uint32_t* partial) {
  Limbs sum = {{0, 0, 0, 0, 0}};
  for (uint32_t s = 0; s < chunk.segments; ++s) {
    const uint32_t* const share = partial + kPartialWords * (chunk.first_segment + s);
    sum = plus(sum, {{share[0], share[1], share[2], share[3], share[4]}});
  }
  const Limbs h = reduced(sum);
  const uint32_t word[4] = {h.limb[0] | (h.limb[1] << 26), (h.limb[1] >> 6) | (h.limb[2] << 20),
                            (h.limb[2] >> 12) | (h.limb[3] << 14),
                            (h.limb[3] >> 18) | (h.limb[4] << 8)};
  Words mac = {{0, 0, 0, 0}};
  uint64_t carry = 0;
  for (int i = 0; i < 4; ++i) {
    carry += static_cast<uint64_t>(word[i]) + chunk.pad[i];
    mac.word[i] = static_cast<uint32_t>(carry);
    carry >>= 32;
  }
  return mac;
}

// Looks at all 16 bytes.
TENSORIZER_KERNEL bool is_genuine(const ChunkToOpen& chunk, const uint32_t* partial) {
  const Words mac = mac_of(chunk, partial);
  uint32_t difference = 0;
  for (int i = 0; i < 4; ++i) difference |= mac.word[i] ^ chunk.mac[i];
  return difference == 0;
}

TENSORIZER_KERNEL uint32_t rotated(uint32_t value, uint32_t by) {
  return (value << by) | (value >> (32 - by));
}

TENSORIZER_KERNEL void quarter_round(uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d) {
  b ^= rotated(a + d, 7);
  c ^= rotated(b + a, 9);
  d ^= rotated(c + b, 13);
  a ^= rotated(d + c, 18);
}

// The 64 bytes of keystream block `counter`.
TENSORIZER_KERNEL void keystream(const ChunkToOpen& chunk, uint32_t counter, uint32_t (&x)[16]) {
  const uint32_t (&k)[8] = chunk.subkey;
  const uint32_t start[16] = {
      0x61707865, k[0], k[1],       k[2], k[3], 0x3320646e, chunk.nonce[0], chunk.nonce[1],
      counter,    0,    0x79622d32, k[4], k[5], k[6],       k[7],           0x6b206574};
  for (int i = 0; i < 16; ++i) x[i] = start[i];
#if defined(__CUDACC__)
#pragma unroll 1
#endif
  for (int round = 0; round < 10; ++round) {
    quarter_round(x[0], x[4], x[8], x[12]);
    quarter_round(x[5], x[9], x[13], x[1]);
    quarter_round(x[10], x[14], x[2], x[6]);
    quarter_round(x[15], x[3], x[7], x[11]);
    quarter_round(x[0], x[1], x[2], x[3]);
    quarter_round(x[5], x[6], x[7], x[4]);
    quarter_round(x[10], x[11], x[8], x[9]);
    quarter_round(x[15], x[12], x[13], x[14]);
  }
  for (int i = 0; i < 16; ++i) x[i] += start[i];
}

// Keystream block `counter` covers message bytes 64 * counter - 32 and the 63 behind it: the first
// half of block 0 is the MAC's key.
TENSORIZER_KERNEL void open_salsa_block(const ChunkToOpen& chunk, uint32_t counter) {
  unsigned char* const data = pointer_to(chunk.address);
  const uint32_t nbytes = static_cast<uint32_t>(chunk.nbytes);
  uint32_t key[16];
  keystream(chunk, counter, key);
#if defined(__CUDACC__)
#pragma unroll
#endif
  for (uint32_t quarter = 0; quarter < 4; ++quarter) {
    if (counter == 0 && quarter < 2) continue;
    const uint32_t at = kSalsaBlockNbytes * counter + 16 * quarter - 32;
    if (at >= nbytes) continue;
    if (nbytes - at >= 16) {
      Words words = load_words(data + at);
      for (uint32_t i = 0; i < 4; ++i) words.word[i] ^= key[4 * quarter + i];
      store_words(data + at, words);
    } else {
#if defined(__CUDACC__)
#pragma unroll
#endif
      for (uint32_t i = 0; i < 15; ++i) {
        if (i < nbytes - at)
          data[at + i] = static_cast<unsigned char>(data[at + i] ^
                                                    (key[4 * quarter + i / 4] >> (8 * (i % 4))));
      }
    }
  }
}

struct OpenShared {
  uint32_t genuine;
};

// One thread block for each segment of each chunk, after mac_kernel() of all of them. Decrypts in
// place where the MAC is right; says in verdict[chunk] whether it was.
template <class Block>
TENSORIZER_KERNEL void open_kernel(Block& block, OpenShared& shared, const ChunkToOpen* chunks,
                                   const uint32_t* chunk_of, const uint32_t* partial,
                                   uint32_t* verdict) {
  const uint32_t index = chunk_of[block.index()];
  const ChunkToOpen& chunk = chunks[index];
  const uint32_t segment = block.index() - chunk.first_segment;
  block.each([&](uint32_t t) {
    if (t != 0) return;
    shared.genuine = is_genuine(chunk, partial) ? 1 : 0;
    if (segment == 0) verdict[index] = shared.genuine ? kVerdictGenuine : kVerdictForged;
  });
  block.sync();
  block.each([&](uint32_t t) {
    if (!shared.genuine) return;
    const uint32_t blocks =
        (static_cast<uint32_t>(chunk.nbytes) + 32 + kSalsaBlockNbytes - 1) / kSalsaBlockNbytes;
    // A chunk that fills its segments has one keystream block more than they do.
    const uint32_t end =
        segment + 1 == chunk.segments ? blocks : (segment + 1) * kSegmentSalsaBlocks;
    for (uint32_t counter = segment * kSegmentSalsaBlocks + t; counter < end; counter += kThreads)
      open_salsa_block(chunk, counter);
  });
}

}  // namespace tensorizer::device::cuda
