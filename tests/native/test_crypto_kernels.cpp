// Every kernel of ours against libsodium: every short length, all edges (block, batch, step,
// chunk), every alignment, in place and out of place; and its parts alone, where their own edges
// are (counters, limbs, carries).
#include <gtest/gtest.h>
#include <sodium.h>

#include <string>
#include <utility>
#include <vector>

#include "crypto/kernels/box_kernel.h"
#include "crypto/kernels/poly1305.h"
#include "crypto/kernels/salsa20.h"
#include "crypto_oracle.h"

namespace tensorizer::crypto {
namespace {

using testing::Message;
using testing::Placed;
using testing::some_bytes;

std::vector<const BoxKernel*> own_kernels() {
  std::vector<const BoxKernel*> kernels;
  for (const BoxKernel* kernel : compiled_kernels()) {
    if (kernel->usable() && kernel != &kLibsodiumKernel) kernels.push_back(kernel);
  }
  return kernels;
}

class Kernel : public ::testing::TestWithParam<const BoxKernel*> {
 protected:
  const BoxKernel& kernel() const { return *GetParam(); }

  // True where the kernel does with this message what libsodium did, at these distances from a
  // 64-byte boundary.
  bool agrees(const Message& m, size_t in_at, size_t out_at) const {
    const size_t n = m.plain.size();
    const Placed plain(m.plain, in_at), cipher(n, out_at), back(n, in_at + 1);
    uint8_t mac[16];
    kernel().seal(cipher.data(), mac, plain.data(), n, m.nonce.data(), m.key.data());
    bool right = cipher.holds(m.cipher) && cipher.canaries_live() && plain.holds(m.plain) &&
                 std::memcmp(mac, m.mac.data(), sizeof mac) == 0;
    right = right && kernel().open(back.data(), cipher.data(), m.mac.data(), n, m.nonce.data(),
                                   m.key.data());
    right = right && back.holds(m.plain) && back.canaries_live() && cipher.holds(m.cipher);
    mac[n % 16] ^= static_cast<uint8_t>(1 << (n % 8));
    return right &&
           !kernel().open(back.data(), cipher.data(), mac, n, m.nonce.data(), m.key.data());
  }

  bool agrees_in_place(const Message& m, size_t at) const {
    const size_t n = m.plain.size();
    const Placed text(m.plain, at);
    uint8_t mac[16];
    kernel().seal(text.data(), mac, text.data(), n, m.nonce.data(), m.key.data());
    bool right = text.holds(m.cipher) && std::memcmp(mac, m.mac.data(), sizeof mac) == 0;
    mac[0] ^= 1;
    right = right && !kernel().open(text.data(), text.data(), mac, n, m.nonce.data(), m.key.data());
    right = right && text.holds(m.cipher);
    right = right &&
            kernel().open(text.data(), text.data(), m.mac.data(), n, m.nonce.data(), m.key.data());
    return right && text.holds(m.plain) && text.canaries_live();
  }
};

TEST_P(Kernel, AgreesWithLibsodiumOnEveryLengthTo2200) {
  for (size_t n = 0; n <= 2200; ++n) {
    const Message m(n, n);
    ASSERT_TRUE(agrees(m, n, 3 * n + 1)) << n << " bytes";
    ASSERT_TRUE(agrees_in_place(m, 7 * n)) << n << " bytes in place";
  }
}

TEST_P(Kernel, AgreesWithLibsodiumAroundStepsAndChunks) {
  constexpr size_t kStep = 8192, kChunk = size_t{2} << 20;
  for (const size_t edge : {kStep, kStep + 32, 2 * kStep, 2 * kStep + 32, 3 * kStep + 32, kChunk}) {
    for (const int offset :
         {-1057, -1025, -1024, -513, -65, -64, -63, -33, -32, -31, -16,  -1,   0,   1,
          15,    16,    31,    32,   33,  63,  64,  65,  511, 513, 1023, 1024, 1025}) {
      const size_t n = edge + static_cast<size_t>(offset);
      const Message m(n, n);
      ASSERT_TRUE(agrees(m, n, n + 5)) << n << " bytes";
      if (edge != kChunk || offset % 32 == 0) {
        ASSERT_TRUE(agrees_in_place(m, n)) << n << " bytes in place";
      }
    }
  }
}

TEST_P(Kernel, AgreesWithLibsodiumOnEveryAlignment) {
  const Message m(3333, 1);
  for (size_t in_at = 0; in_at < 64; ++in_at) {
    for (size_t out_at = 0; out_at < 64; ++out_at) {
      ASSERT_TRUE(agrees(m, in_at, out_at)) << in_at << " " << out_at;
    }
    ASSERT_TRUE(agrees_in_place(m, in_at)) << in_at;
  }
}

TEST_P(Kernel, AgreesWithLibsodiumOnRandomMessages) {
  for (uint64_t round = 0; round < 300; ++round) {
    const size_t n = randombytes_uniform(round % 10 == 0 ? 300'000 : 20'000);
    const Message m(n, (uint64_t{randombytes_random()} << 32) + round);
    ASSERT_TRUE(agrees(m, randombytes_random(), randombytes_random())) << n << " bytes";
  }
}

std::string kernel_name(const ::testing::TestParamInfo<const BoxKernel*>& info) {
  return std::string(info.param->name);
}
INSTANTIATE_TEST_SUITE_P(Own, Kernel, ::testing::ValuesIn(own_kernels()), kernel_name);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(Kernel);  // no kernel of ours for this processor

TEST(Hsalsa20, AgreesWithLibsodium) {
  for (uint64_t seed = 0; seed < 100; ++seed) {
    const auto key = some_bytes(32, seed), nonce = some_bytes(16, seed + 1000);
    uint8_t wanted[32], found[32];
    crypto_core_hsalsa20(wanted, nonce.data(), key.data(), nullptr);
    hsalsa20(found, key.data(), nonce.data());
    ASSERT_EQ(std::memcmp(wanted, found, sizeof wanted), 0);
  }
}

// The scalar block function in the shape of the vectorised ones.
void salsa20_xor_scalar(uint8_t* out, const uint8_t* in, size_t nbytes, const SalsaState& state,
                        uint64_t counter) noexcept {
  for (size_t at = 0; at < nbytes; ++at) {
    uint8_t block[kSalsaBlockNbytes];
    if (at % kSalsaBlockNbytes == 0) salsa20_block(block, state, counter + at / kSalsaBlockNbytes);
    out[at] = static_cast<uint8_t>(in[at] ^ block[at % kSalsaBlockNbytes]);
  }
}

std::vector<std::pair<std::string, SalsaXor>> keystreams() {
  std::vector<std::pair<std::string, SalsaXor>> all{{"scalar", &salsa20_xor_scalar}};
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) all.emplace_back("avx2", &salsa20_xor_avx2);
  if (__builtin_cpu_supports("avx512f")) all.emplace_back("avx512", &salsa20_xor_avx512);
#elif defined(__aarch64__)
  all.emplace_back("neon", &salsa20_xor_neon);
#endif
  return all;
}

TEST(Salsa20, AgreesWithLibsodiumWhereTheCounterCarries) {
  const auto key = some_bytes(32, 1), nonce = some_bytes(8, 2), text = some_bytes(4096, 3);
  const SalsaState state = salsa20_state(key.data(), nonce.data());
  const uint64_t starts[] = {
      0,           1,           0xFFFFFFFF - 20,    0xFFFFFFF8,      0xFFFFFFFF,
      0x100000000, 0x1FFFFFFF0, 0x7FFFFFFFFFFFFFF8, ~uint64_t{0} - 9};
  for (const auto& [name, salsa_xor] : keystreams()) {
    for (const uint64_t start : starts) {
      for (const size_t n : {64, 1000, 4096}) {
        std::vector<uint8_t> wanted(n), found(n);
        crypto_stream_salsa20_xor_ic(wanted.data(), text.data(), n, nonce.data(), start,
                                     key.data());
        salsa_xor(found.data(), text.data(), n, state, start);
        ASSERT_EQ(found, wanted) << name << " from block " << start;
      }
    }
  }
}

std::vector<std::pair<std::string, PolyBlocks>> poly_functions() {
  std::vector<std::pair<std::string, PolyBlocks>> all{{"scalar", &poly1305_blocks}};
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) all.emplace_back("avx2", &poly1305_blocks_avx2);
  if (__builtin_cpu_supports("avx512ifma")) all.emplace_back("ifma", &poly1305_blocks_ifma);
#elif defined(__aarch64__)
  all.emplace_back("neon", &poly1305_blocks_neon);
#endif
  return all;
}

// The MAC of `text`, absorbed in pieces of `piece` bytes (a multiple of 16).
std::vector<uint8_t> poly_mac(PolyBlocks blocks, const std::vector<uint8_t>& key,
                              const std::vector<uint8_t>& text, size_t piece) {
  Poly1305 state;
  poly1305_start(state, key.data());
  poly1305_fill_powers(state);
  size_t at = 0;
  for (; text.size() - at >= kPolyBlockNbytes; at += piece) {
    piece = std::min(piece, (text.size() - at) / kPolyBlockNbytes * kPolyBlockNbytes);
    blocks(state, text.data() + at, piece / kPolyBlockNbytes);
  }
  std::vector<uint8_t> mac(kPolyMacNbytes);
  poly1305_finish(state, text.data() + at, text.size() - at, mac.data());
  return mac;
}

std::vector<uint8_t> sodium_mac(const std::vector<uint8_t>& key, const std::vector<uint8_t>& text) {
  std::vector<uint8_t> mac(kPolyMacNbytes);
  crypto_onetimeauth(mac.data(), text.data(), text.size(), key.data());
  return mac;
}

TEST(Poly1305, AgreesWithLibsodiumInPiecesOfAnySize) {
  const auto key = some_bytes(32, 5);
  for (const auto& [name, blocks] : poly_functions()) {
    for (size_t n = 1; n <= 1600; n += 1 + n / 97) {
      const auto text = some_bytes(n, n);
      for (const size_t piece : {16, 48, 128, 256, 272, 400, 1600}) {
        ASSERT_EQ(poly_mac(blocks, key, text, piece), sodium_mac(key, text)) << name << " " << n;
      }
    }
  }
}

// Limbs are largest, and carries longest, for bytes that are all ones or nearly so.
TEST(Poly1305, AgreesWithLibsodiumOnExtremeNumbers) {
  const uint8_t fills[] = {0x00, 0x01, 0x7F, 0x80, 0xFB, 0xFE, 0xFF};
  for (const auto& [name, blocks] : poly_functions()) {
    for (const uint8_t r_fill : fills) {
      for (const uint8_t pad_fill : fills) {
        std::vector<uint8_t> key(16, r_fill);
        key.insert(key.end(), 16, pad_fill);
        for (const uint8_t fill : fills) {
          for (const size_t n : {16, 17, 32, 128, 255, 256, 272, 512, 1000, 5000}) {
            std::vector<uint8_t> text(n, fill);
            ASSERT_EQ(poly_mac(blocks, key, text, 5008), sodium_mac(key, text)) << name << " " << n;
            text[n / 2] ^= 0xFB;
            text[n - 1] = 0;
            ASSERT_EQ(poly_mac(blocks, key, text, 5008), sodium_mac(key, text)) << name << " " << n;
          }
        }
      }
    }
  }
}

// RFC 8439, appendix A.3, vectors 7 to 11: results that reach 2^130 - 5 or 2^128 exactly.
TEST(Poly1305, GivesTheMacsOfTheRfcAtTheEdgesOfTheField) {
  struct Vector {
    const char *r, *s, *text, *mac;
  };
  const std::string ones(32, 'f'), zeros(32, '0');
  const Vector vectors[] = {
      {"01000000000000000000000000000000", zeros.c_str(),
       "fffffffffffffffffffffffffffffffff0ffffffffffffffffffffffffffffff11000000000000000000000000"
       "000000",
       "05000000000000000000000000000000"},
      {"01000000000000000000000000000000", zeros.c_str(),
       "fffffffffffffffffffffffffffffffffbfefefefefefefefefefefefefefefe01010101010101010101010101"
       "010101",
       "00000000000000000000000000000000"},
      {"02000000000000000000000000000000", zeros.c_str(), "fdffffffffffffffffffffffffffffff",
       "faffffffffffffffffffffffffffffff"},
      {"01000000000000000400000000000000", zeros.c_str(),
       "e33594d7505e43b900000000000000003394d7505e4379cd010000000000000000000000000000000000000000"
       "00000001000000000000000000000000000000",
       "14000000000000005500000000000000"},
      {"02000000000000000000000000000000", ones.c_str(), "02000000000000000000000000000000",
       "03000000000000000000000000000000"}};
  const auto bytes = [](const std::string& hex) {
    std::vector<uint8_t> out(hex.size() / 2);
    sodium_hex2bin(out.data(), out.size(), hex.data(), hex.size(), nullptr, nullptr, nullptr);
    return out;
  };
  for (const Vector& v : vectors) {
    const auto key = bytes(std::string(v.r) + v.s);
    EXPECT_EQ(poly_mac(&poly1305_blocks, key, bytes(v.text), 16), bytes(v.mac));
    EXPECT_EQ(sodium_mac(key, bytes(v.text)), bytes(v.mac));
  }
}

}  // namespace
}  // namespace tensorizer::crypto
