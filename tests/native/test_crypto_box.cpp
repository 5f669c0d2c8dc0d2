// The contract of chunked_box.h, whatever kernel runs: vectors of docs/format.md, damage, in place
// and out of place.
#include <gtest/gtest.h>
#include <sodium.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "core/error.h"
#include "crypto/chunked_box.h"

namespace tensorizer::crypto {
namespace {

using Bytes = std::vector<std::byte>;
using Mac = std::array<std::byte, kMacNbytes>;
using Nonce = std::array<std::byte, kNonceNbytes>;

Bytes from_hex(const std::string& text) {
  Bytes bytes(text.size() / 2);
  size_t written = 0;
  sodium_hex2bin(reinterpret_cast<unsigned char*>(bytes.data()), bytes.size(), text.data(),
                 text.size(), " ", &written, nullptr);
  bytes.resize(written);
  return bytes;
}

template <class Range>
std::string to_hex(const Range& bytes) {
  std::string text(bytes.size() * 2 + 1, '\0');
  sodium_bin2hex(text.data(), text.size(), reinterpret_cast<const unsigned char*>(bytes.data()),
                 bytes.size());
  text.pop_back();
  return text;
}

template <size_t N>
std::array<std::byte, N> counting(int first) {
  std::array<std::byte, N> bytes;
  for (size_t i = 0; i < N; ++i) bytes[i] = static_cast<std::byte>(first + static_cast<int>(i));
  return bytes;
}

// Each test of this suite runs once per kernel of this machine.
class Box : public ::testing::TestWithParam<std::string_view> {
 protected:
  void SetUp() override { ASSERT_TRUE(select_kernel(GetParam())); }
  void TearDown() override { select_kernel(available_kernels().front()); }
};

TEST_P(Box, GivesTheBytesOfTheWorkedExample) {
  const SecretKey key(counting<kKeyNbytes>(0));
  const Nonce nonce = counting<kNonceNbytes>(0x40);
  const Bytes plain = from_hex("0000803f000020c0");
  Bytes cipher(plain.size());
  Mac mac;
  seal(cipher, mac, plain, nonce, key);
  EXPECT_EQ(to_hex(cipher), "4a17d5463a519bea");
  EXPECT_EQ(to_hex(mac), "e160b2b554008e879d034852084ff9f2");
}

TEST_P(Box, GivesTheBytesOfTheMultiChunkVector) {
  const SecretKey key(counting<kKeyNbytes>(0));
  Nonce nonce = counting<kNonceNbytes>(0x40);
  nonce[0] = std::byte{0xFF};
  Bytes plain(2500);
  for (size_t i = 0; i < plain.size(); ++i) plain[i] = static_cast<std::byte>(i % 251);
  Bytes cipher(plain.size());
  const char* macs[] = {"38eb4d10db375073f8badef69a24275c", "f271f93179e64ea0f8b3bddfbc713a16",
                        "71ed8a65c202260c076d57c5a212ebad"};
  for (size_t chunk = 0; chunk < 3; ++chunk) {
    const size_t at = chunk * 1024, nbytes = std::min<size_t>(1024, plain.size() - at);
    Mac mac;
    seal(std::span(cipher).subspan(at, nbytes), mac, std::span(plain).subspan(at, nbytes),
         nonce_plus(nonce, chunk), key);
    EXPECT_EQ(to_hex(mac), macs[chunk]);
  }
  std::array<unsigned char, 32> digest;
  crypto_hash_sha256(digest.data(), reinterpret_cast<const unsigned char*>(cipher.data()),
                     cipher.size());
  EXPECT_EQ(to_hex(digest), "295096ee6d8a46c31c38007aa8064e4290617d1c01e4693a3c190ae634a99c79");
}

// NaCl's tests/secretbox.c: the first published message of this construction.
TEST_P(Box, GivesTheBytesOfTheNaclVector) {
  const SecretKey key(from_hex("1b27556473e985d462cd51197a9a46c76009549eac6474f206c4ee0844f68389"));
  Nonce nonce;
  std::ranges::copy(from_hex("69696ee955b62b73cd62bda875fc73d68219e0036b7a0b37"), nonce.begin());
  const Bytes plain = from_hex(
      "be075fc53c81f2d5cf141316ebeb0c7b5228c52a4c62cbd44b66849b64244ffce5ecbaaf33bd751a1ac728d45e6c"
      "61296cdc3c01233561f41db66cce314adb310e3be8250c46f06dceea3a7fa1348057e2f6556ad6b1318a024a838f"
      "21af1fde048977eb48f59ffd4924ca1c60902e52f0a089bc76897040e082f937763848645e0705");
  Bytes cipher(plain.size());
  Mac mac;
  seal(cipher, mac, plain, nonce, key);
  EXPECT_EQ(to_hex(mac), "f3ffc7703f9400e52a7dfb4b3d3305d9");
  EXPECT_EQ(
      to_hex(cipher),
      "8e993b9f48681273c29650ba32fc76ce48332ea7164d96a4476fb8c531a1186ac0dfc17c98dce87b4da7f011ec"
      "48c97271d2c20f9b928fe2270d6fb863d51738b48eeee314a7cc8ab932164548e526ae90224368517acfeabd6b"
      "b3732bc0e9da99832b61ca01b6de56244a9e88d5f9b37973f622a43d14a6599b1f654cb45a74e355a5");
  Bytes back(plain.size());
  EXPECT_TRUE(open(back, cipher, mac, nonce, key));
  EXPECT_EQ(back, plain);
}

TEST_P(Box, AnEmptyMessageHasAMacThatIsChecked) {
  const SecretKey key = SecretKey::random();
  const Nonce nonce = counting<kNonceNbytes>(1);
  Mac mac;
  seal({}, mac, {}, nonce, key);
  EXPECT_TRUE(open({}, {}, mac, nonce, key));
  mac[3] ^= std::byte{1};
  EXPECT_FALSE(open({}, {}, mac, nonce, key));
}

TEST_P(Box, AnyChangedBitIsRefusedAndTheDestinationIsZero) {
  const SecretKey key = SecretKey::random();
  const Nonce nonce = counting<kNonceNbytes>(7);
  for (const size_t nbytes : {1, 15, 16, 31, 32, 33, 64, 1000, 5000}) {
    Bytes plain(nbytes), cipher(nbytes), back(nbytes);
    random_bytes(plain);
    Mac mac;
    seal(cipher, mac, plain, nonce, key);
    const auto refused = [&](NonceView with_nonce, const SecretKey& with_key) {
      random_bytes(back);
      const bool genuine = open(back, cipher, mac, with_nonce, with_key);
      return !genuine && std::ranges::all_of(back, [](std::byte b) { return b == std::byte{}; });
    };
    for (size_t at = 0; at < nbytes; at += 1 + at / 7) {
      for (int bit = 0; bit < 8; ++bit) {
        cipher[at] ^= std::byte(1 << bit);
        EXPECT_TRUE(refused(nonce, key)) << nbytes << " bytes, byte " << at << " bit " << bit;
        cipher[at] ^= std::byte(1 << bit);
      }
    }
    for (size_t at = 0; at < kMacNbytes; ++at) {
      mac[at] ^= std::byte{0x80};
      EXPECT_TRUE(refused(nonce, key));
      mac[at] ^= std::byte{0x80};
    }
    for (size_t at = 0; at < kNonceNbytes; ++at) {
      Nonce other = nonce;
      other[at] ^= std::byte{0x01};
      EXPECT_TRUE(refused(other, key));
    }
    EXPECT_TRUE(refused(nonce, SecretKey::random()));
    EXPECT_TRUE(open(back, cipher, mac, nonce, key));
    EXPECT_EQ(back, plain);
  }
}

TEST_P(Box, AMessageCutOrExtendedIsRefused) {
  const SecretKey key = SecretKey::random();
  const Nonce nonce = counting<kNonceNbytes>(9);
  Bytes plain(4000), cipher(4001), back(4001);
  random_bytes(plain);
  Mac mac;
  seal(std::span(cipher).first(4000), mac, plain, nonce, key);
  for (size_t nbytes : {0, 1, 3999, 4001}) {
    EXPECT_FALSE(
        open(std::span(back).first(nbytes), std::span(cipher).first(nbytes), mac, nonce, key));
  }
}

TEST_P(Box, WorksInPlaceAndLeavesRefusedCiphertextAlone) {
  const SecretKey key = SecretKey::random();
  const Nonce nonce = counting<kNonceNbytes>(3);
  for (const size_t nbytes : {1, 31, 32, 33, 95, 96, 1055, 1056, 1057, 20000}) {
    Bytes plain(nbytes), expected(nbytes);
    random_bytes(plain);
    Mac mac, expected_mac;
    seal(expected, expected_mac, plain, nonce, key);
    Bytes buffer = plain;
    seal(buffer, mac, buffer, nonce, key);
    EXPECT_EQ(buffer, expected);
    EXPECT_EQ(mac, expected_mac);
    mac[0] ^= std::byte{1};
    EXPECT_FALSE(open(buffer, buffer, mac, nonce, key));
    EXPECT_EQ(buffer, expected);
    EXPECT_TRUE(open(buffer, buffer, expected_mac, nonce, key));
    EXPECT_EQ(buffer, plain);
  }
}

std::string test_name(const ::testing::TestParamInfo<std::string_view>& info) {
  return std::string(info.param);
}
INSTANTIATE_TEST_SUITE_P(Kernels, Box, ::testing::ValuesIn(available_kernels()), test_name);

TEST(BoxKernels, LibsodiumIsAlwaysThereAndLast) {
  EXPECT_EQ(available_kernels().back(), "libsodium");
}

TEST(BoxKernels, TheBestOneIsActiveUntilAnotherIsChosen) {
  EXPECT_EQ(active_kernel(), available_kernels().front());
  EXPECT_TRUE(select_kernel("libsodium"));
  EXPECT_EQ(active_kernel(), "libsodium");
  EXPECT_TRUE(select_kernel(available_kernels().front()));
}

TEST(BoxKernels, AnUnknownNameChangesNothing) {
  const std::string_view before = active_kernel();
  EXPECT_FALSE(select_kernel("no-such-kernel"));
  EXPECT_FALSE(select_kernel(""));
  EXPECT_EQ(active_kernel(), before);
}

TEST(BoxKernels, OneKeyServesManyThreadsWhileKernelsAreChosen) {
  const SecretKey key = SecretKey::random();
  const Nonce base = counting<kNonceNbytes>(1);
  const auto work = [&](uint64_t number) {
    Bytes plain(3000 + number), cipher(plain.size()), back(plain.size());
    for (int round = 0; round < 50; ++round) {
      const Nonce nonce = nonce_plus(base, 1000 * number + round);
      Mac mac;
      random_bytes(plain);
      seal(cipher, mac, plain, nonce, key);
      EXPECT_TRUE(open(back, cipher, mac, nonce, key));
      EXPECT_EQ(back, plain);
      const auto kernels = available_kernels();
      select_kernel(kernels[round % kernels.size()]);
    }
  };
  std::vector<std::thread> threads;
  for (uint64_t number = 0; number < 4; ++number) threads.emplace_back(work, number);
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(select_kernel(available_kernels().front()));
}

TEST(NoncePlus, CountsAsOneLittleEndianNumberThatWraps) {
  Nonce ones;
  ones.fill(std::byte{0xFF});
  EXPECT_EQ(nonce_plus(ones, 1), Nonce{});
  Nonce nonce = counting<kNonceNbytes>(0x40);
  nonce[0] = std::byte{0xFF};
  EXPECT_EQ(to_hex(nonce_plus(nonce, 1)), "004242434445464748494a4b4c4d4e4f5051525354555657");
  EXPECT_EQ(nonce_plus(nonce, 0), nonce);
}

TEST(NoncePlus, AgreesWithSodiumIncrementAndSodiumAdd) {
  for (int round = 0; round < 200; ++round) {
    Nonce nonce;
    random_bytes(nonce);
    if (round % 3 == 0) std::fill_n(nonce.begin(), 8 + round % 16, std::byte{0xFF});
    std::array<unsigned char, kNonceNbytes> expected, addend{};
    std::memcpy(expected.data(), nonce.data(), kNonceNbytes);
    uint64_t n = 0;
    randombytes_buf(&n, sizeof n);
    if (round % 2 == 0) n %= 3;
    std::memcpy(addend.data(), &n, sizeof n);
    sodium_add(expected.data(), addend.data(), kNonceNbytes);
    EXPECT_EQ(to_hex(nonce_plus(nonce, n)), to_hex(expected));
  }
}

}  // namespace
}  // namespace tensorizer::crypto
