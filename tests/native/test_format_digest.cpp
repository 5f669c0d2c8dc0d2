// CRC-32 and SHA-256 against known answers and against OpenSSL.
#include <gtest/gtest.h>
#include <openssl/evp.h>

#include <random>

#include "format/digest.h"
#include "format/sha256_blocks.h"

namespace tensorizer::format {
namespace {

std::vector<std::byte> random_bytes(size_t nbytes, uint32_t seed = 1) {
  std::mt19937 generator(seed);
  std::vector<std::byte> bytes(nbytes);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(generator());
  return bytes;
}

std::span<const std::byte> text_bytes(std::string_view text) {
  return std::as_bytes(std::span(text));
}

std::string hex(const Sha256Digest& digest) {
  std::string text;
  for (std::byte b : digest) {
    char two[3];
    std::snprintf(two, sizeof two, "%02x", std::to_integer<unsigned>(b));
    text += two;
  }
  return text;
}

Sha256Digest sha256(std::span<const std::byte> bytes) {
  Sha256 sha;
  sha.update(bytes);
  return sha.finish();
}

Sha256Digest openssl_sha256(std::span<const std::byte> bytes) {
  Sha256Digest digest;
  unsigned nbytes = 0;
  EVP_Digest(bytes.data(), bytes.size(), reinterpret_cast<unsigned char*>(digest.data()), &nbytes,
             EVP_sha256(), nullptr);
  return digest;
}

TEST(Sha256, gives_the_published_answers) {
  EXPECT_EQ(hex(sha256({})), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(hex(sha256(text_bytes("abc"))),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(hex(sha256(text_bytes("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"))),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(hex(sha256(std::vector<std::byte>(1'000'000, std::byte{'a'}))),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST(Sha256, agrees_with_openssl_at_every_length_around_block_edges) {
  const auto bytes = random_bytes(64 * 5 + 9);
  for (size_t n = 0; n <= bytes.size(); ++n) {
    const auto part = std::span(bytes).first(n);
    ASSERT_EQ(hex(sha256(part)), hex(openssl_sha256(part))) << n;
  }
}

TEST(Sha256, does_not_depend_on_how_the_bytes_are_cut) {
  const auto bytes = random_bytes(4096);
  const auto whole = hex(openssl_sha256(bytes));
  std::mt19937 generator(7);
  for (int round = 0; round < 200; ++round) {
    Sha256 sha;
    for (size_t at = 0; at < bytes.size();) {
      const size_t n = std::min<size_t>(generator() % 200, bytes.size() - at);
      sha.update(std::span(bytes).subspan(at, n));
      at += n;
    }
    ASSERT_EQ(hex(sha.finish()), whole);
  }
}

TEST(Sha256, a_pair_gives_what_two_single_streams_give) {
  const auto x = random_bytes(5000, 2), y = random_bytes(5000, 3);
  std::mt19937 generator(11);
  for (int round = 0; round < 300; ++round) {
    const size_t nx = generator() % x.size(), ny = generator() % y.size();
    Sha256 a, b;
    size_t at_x = 0, at_y = 0;
    while (at_x < nx || at_y < ny) {
      const size_t take_x = std::min<size_t>(generator() % 700, nx - at_x);
      const size_t take_y = std::min<size_t>(generator() % 700, ny - at_y);
      Sha256::update_pair(a, std::span(x).subspan(at_x, take_x), b,
                          std::span(y).subspan(at_y, take_y));
      at_x += take_x, at_y += take_y;
    }
    ASSERT_EQ(hex(a.finish()), hex(openssl_sha256(std::span(x).first(nx)))) << round;
    ASSERT_EQ(hex(b.finish()), hex(openssl_sha256(std::span(y).first(ny)))) << round;
  }
}

TEST(Sha256, a_copy_continues_on_its_own) {
  const auto bytes = random_bytes(300);
  Sha256 first;
  first.update(std::span(bytes).first(100));
  Sha256 second = first;
  first.update(std::span(bytes).subspan(100));
  EXPECT_EQ(hex(first.finish()), hex(openssl_sha256(bytes)));
  EXPECT_EQ(hex(second.finish()), hex(openssl_sha256(std::span(bytes).first(100))));
}

TEST(Sha256, the_kernels_agree_on_any_state) {
  if (!sha_ni_supported()) GTEST_SKIP() << "no SHA instructions here";
  const auto x = random_bytes(64 * 33, 4), y = random_bytes(64 * 33, 5);
  std::mt19937 generator(6);
  for (size_t nblocks = 0; nblocks <= 33; ++nblocks) {
    std::array<uint32_t, 8> states[6];
    for (size_t word = 0; word < 8; ++word) {
      states[0][word] = static_cast<uint32_t>(generator());
      states[1][word] = static_cast<uint32_t>(generator());
    }
    states[2] = states[4] = states[0];
    states[3] = states[5] = states[1];
    openssl_absorb(states[0].data(), x.data(), nblocks);
    openssl_absorb(states[1].data(), y.data(), nblocks);
    sha_ni_absorb(states[2].data(), x.data(), nblocks);
    sha_ni_absorb(states[3].data(), y.data(), nblocks);
    sha_ni_absorb_pair(states[4].data(), x.data(), states[5].data(), y.data(), nblocks);
    ASSERT_EQ(states[2], states[0]) << nblocks;
    ASSERT_EQ(states[3], states[1]) << nblocks;
    ASSERT_EQ(states[4], states[0]) << nblocks;
    ASSERT_EQ(states[5], states[1]) << nblocks;
  }
}

TEST(Sha256, names_its_kernel) {
  const std::string kernel = sha256_kernel();
  EXPECT_TRUE(kernel == "sha-ni" || kernel == "openssl") << kernel;
}

// Bit by bit, from the definition.
uint32_t slow_crc32(uint32_t crc, std::span<const std::byte> bytes) {
  crc = ~crc;
  for (std::byte byte : bytes) {
    crc ^= std::to_integer<uint32_t>(byte);
    for (int bit = 0; bit < 8; ++bit) crc = (crc & 1) != 0 ? crc >> 1 ^ 0xEDB88320 : crc >> 1;
  }
  return ~crc;
}

TEST(Crc32, gives_the_published_answer) {
  EXPECT_EQ(crc32(0, text_bytes("123456789")), 0xCBF43926u);
  EXPECT_EQ(crc32(0, {}), 0u);
}

TEST(Crc32, agrees_with_the_definition_at_every_length_and_continues) {
  const auto bytes = random_bytes(700);
  for (size_t n = 0; n <= bytes.size(); ++n) {
    const auto part = std::span(bytes).first(n);
    ASSERT_EQ(crc32(0, part), slow_crc32(0, part)) << n;
    ASSERT_EQ(crc32(crc32(0, part), std::span(bytes).subspan(n)), crc32(0, bytes)) << n;
  }
}

TEST(Crc32, of_a_whole_follows_from_its_parts) {
  const auto bytes = random_bytes(100'000);
  std::mt19937 generator(5);
  for (int round = 0; round < 300; ++round) {
    const size_t cut = generator() % (bytes.size() + 1);
    const auto a = std::span(bytes).first(cut), b = std::span(bytes).subspan(cut);
    ASSERT_EQ(crc32_combine(crc32(0, a), crc32(0, b), b.size()), crc32(0, bytes)) << cut;
  }
  EXPECT_EQ(crc32_combine(0x12345678, 0, 0), 0x12345678u);
}

TEST(Crc32, combines_lengths_that_no_memory_holds) {
  // CRC of 2^k zero bytes by doubling, against one step of the combination: (A || zeros) || zeros.
  uint32_t zeros = crc32(0, std::vector<std::byte>(1));
  uint64_t nbytes = 1;
  const uint32_t a = crc32(0, text_bytes("tensor"));
  for (; nbytes < uint64_t{1} << 60; nbytes *= 2) {
    const uint32_t twice = crc32_combine(zeros, zeros, nbytes);
    const uint32_t stepwise = crc32_combine(crc32_combine(a, zeros, nbytes), zeros, nbytes);
    ASSERT_EQ(crc32_combine(a, twice, 2 * nbytes), stepwise) << nbytes;
    zeros = twice;
  }
}

}  // namespace
}  // namespace tensorizer::format
