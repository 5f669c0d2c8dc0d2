// Keys in memory, and keys from passphrases.
#include <gtest/gtest.h>
#include <sodium.h>

#include <array>
#include <cstring>
#include <fstream>
#include <string>
#include <utility>

#include "core/error.h"
#include "crypto/key_derivation.h"
#include "crypto/secret_key.h"

namespace tensorizer::crypto {
namespace {

std::span<const std::byte> text(std::string_view value) { return std::as_bytes(std::span(value)); }

std::string hex(const SecretKey& key) {
  std::string out(2 * kKeyNbytes + 1, '\0');
  sodium_bin2hex(out.data(), out.size(), reinterpret_cast<const unsigned char*>(key.bytes().data()),
                 kKeyNbytes);
  out.pop_back();
  return out;
}

template <class Fn>
Errc code_of(Fn&& fn) {
  try {
    fn();
  } catch (const Error& error) {
    return error.code();
  }
  ADD_FAILURE() << "nothing was thrown";
  return Errc::cancelled;
}

constexpr std::array<std::byte, kSaltNbytes> kZeroSalt{};

TEST(SecretKey, HoldsTheBytesItWasGiven) {
  std::array<std::byte, kKeyNbytes> bytes;
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(i * 3);
  const SecretKey key(bytes);
  EXPECT_TRUE(same_secret(key.bytes(), bytes));
}

TEST(SecretKey, RefusesEveryOtherLength) {
  std::array<std::byte, 64> bytes{};
  for (const size_t nbytes : {0, 1, 31, 33, 64}) {
    EXPECT_EQ(code_of([&] { SecretKey{std::span<const std::byte>(bytes).first(nbytes)}; }),
              Errc::invalid_argument);
  }
}

TEST(SecretKey, RandomKeysDiffer) {
  EXPECT_FALSE(same_secret(SecretKey::random().bytes(), SecretKey::random().bytes()));
}

TEST(SecretKey, MovingKeepsTheSecretAtItsPlace) {
  SecretKey a = SecretKey::random();
  const std::string before = hex(a);
  const std::byte* address = a.bytes().data();
  SecretKey b(std::move(a));
  EXPECT_EQ(hex(b), before);
  EXPECT_EQ(b.bytes().data(), address);
  SecretKey c = SecretKey::random();
  c = std::move(b);
  EXPECT_EQ(hex(c), before);
}

#if defined(__linux__)
// VmFlags of the mapping that holds `address`, from /proc/self/smaps.
std::string vm_flags_of(const void* address) {
  std::ifstream smaps("/proc/self/smaps");
  const auto wanted = reinterpret_cast<uintptr_t>(address);
  bool inside = false;
  for (std::string line; std::getline(smaps, line);) {
    unsigned long begin = 0, end = 0;
    if (std::sscanf(line.c_str(), "%lx-%lx ", &begin, &end) == 2)
      inside = begin <= wanted && wanted < end;
    if (inside && line.starts_with("VmFlags:")) return line + " ";
  }
  return "";
}

TEST(SecretKey, IsReadOnlyAndKeptOutOfCoreDumps) {
  const SecretKey key = SecretKey::random();
  const std::string flags = vm_flags_of(key.bytes().data());
  if (flags.empty()) GTEST_SKIP() << "no /proc/self/smaps with VmFlags";
  EXPECT_NE(flags.find(" dd "), std::string::npos) << flags;  // MADV_DONTDUMP
  EXPECT_EQ(flags.find(" wr "), std::string::npos) << flags;
}

TEST(SecretKey, IsLockedWhereTheSystemAllowsIt) {
  // Sanitizers answer yes to mlock() without locking, so ask the kernel what became of it.
  std::array<char, 64> probe{};
  const bool allowed = sodium_mlock(probe.data(), probe.size()) == 0;
  const bool locks = vm_flags_of(probe.data()).find(" lo ") != std::string::npos;
  sodium_munlock(probe.data(), probe.size());
  if (!allowed || !locks) GTEST_SKIP() << "memory cannot be locked here";
  const SecretKey key = SecretKey::random();
  const std::string flags = vm_flags_of(key.bytes().data());
  EXPECT_NE(flags.find(" lo "), std::string::npos) << flags;
}
#endif

TEST(SameSecret, ComparesLengthAndContent) {
  EXPECT_TRUE(same_secret({}, {}));
  EXPECT_TRUE(same_secret(text("abc"), text("abc")));
  EXPECT_FALSE(same_secret(text("abc"), text("abd")));
  EXPECT_FALSE(same_secret(text("abc"), text("ab")));
}

TEST(DeriveKey, GivesTheKeyOfTheVector) {
  const SecretKey key =
      derive_key(text("test"), {1, 8192, kArgon2id13, kZeroSalt}, DerivationLimits{});
  EXPECT_EQ(hex(key), "185d9543e6945bb30c6ecb2d1ac58a388ddfe954c34cf395a4fa12f986897662");
}

TEST(DeriveKey, EveryParameterChangesTheKey) {
  std::array<std::byte, kSaltNbytes> salt{};
  const DerivationLimits limits;
  const std::string base = hex(derive_key(text("test"), {1, 8192, kArgon2id13, salt}, limits));
  EXPECT_NE(hex(derive_key(text("Test"), {1, 8192, kArgon2id13, salt}, limits)), base);
  EXPECT_NE(
      hex(derive_key(text(std::string_view("test\0", 5)), {1, 8192, kArgon2id13, salt}, limits)),
      base);
  EXPECT_NE(hex(derive_key(text("test"), {2, 8192, kArgon2id13, salt}, limits)), base);
  EXPECT_NE(hex(derive_key(text("test"), {1, 9216, kArgon2id13, salt}, limits)), base);
  salt[15] = std::byte{1};
  EXPECT_NE(hex(derive_key(text("test"), {1, 8192, kArgon2id13, salt}, limits)), base);
}

TEST(DeriveKey, AnEmptyPassphraseIsThisLayersBusinessToHash) {
  const auto derive = [] {
    return derive_key({}, {1, 8192, kArgon2id13, kZeroSalt}, DerivationLimits{});
  };
  EXPECT_EQ(hex(derive()), hex(derive()));
}

TEST(DeriveKey, RefusesWhatLibsodiumCannotDo) {
  const auto derive = [](uint64_t ops, uint64_t mem, size_t salt_nbytes) {
    std::array<std::byte, 32> salt{};
    derive_key(text("x"), {ops, mem, kArgon2id13, std::span(salt).first(salt_nbytes)},
               kNoDerivationLimits);
  };
  EXPECT_EQ(code_of([&] { derive(0, 8192, 16); }), Errc::invalid_argument);
  EXPECT_EQ(code_of([&] { derive(kMaxOpslimit + 1, 8192, 16); }), Errc::invalid_argument);
  EXPECT_EQ(code_of([&] { derive(1, 8191, 16); }), Errc::invalid_argument);
  EXPECT_EQ(code_of([&] { derive(1, kMaxMemlimit + 1, 16); }), Errc::invalid_argument);
  EXPECT_EQ(code_of([&] { derive(1, 8192, 15); }), Errc::invalid_argument);
  EXPECT_EQ(code_of([&] { derive(1, 8192, 17); }), Errc::invalid_argument);
}

TEST(DeriveKey, RefusesUnknownAlgorithms) {
  for (const int32_t algorithm : {-1, 0, 1, 3}) {
    EXPECT_EQ(code_of([&] {
                derive_key(text("x"), {1, 8192, algorithm, kZeroSalt}, kNoDerivationLimits);
              }),
              Errc::crypto);
  }
}

TEST(DeriveKey, RefusesToSpendMoreThanTheLimits) {
  const DerivationLimits limits{3, 1 << 20};
  EXPECT_EQ(code_of([&] { derive_key(text("x"), {4, 8192, kArgon2id13, kZeroSalt}, limits); }),
            Errc::crypto);
  EXPECT_EQ(
      code_of([&] { derive_key(text("x"), {1, (1 << 20) + 1, kArgon2id13, kZeroSalt}, limits); }),
      Errc::crypto);
  derive_key(text("x"), {3, 1 << 20, kArgon2id13, kZeroSalt}, limits);
  // Terabytes and billions of passes, which the defaults must stop before anything is allocated or
  // computed.
  EXPECT_EQ(code_of([&] {
              derive_key(text("x"), {kMaxOpslimit, kMaxMemlimit, kArgon2id13, kZeroSalt}, {});
            }),
            Errc::crypto);
}

TEST(DeriveKey, TooLittleMemoryIsAnErrorOfOurs) {
  char overcommit = '1';
  std::ifstream("/proc/sys/vm/overcommit_memory").get(overcommit);
  if (overcommit == '1') GTEST_SKIP() << "this system promises any amount of memory";
  EXPECT_EQ(code_of([&] {
              derive_key(text("x"), {1, kMaxMemlimit, kArgon2id13, kZeroSalt}, kNoDerivationLimits);
            }),
            Errc::crypto);
}

TEST(DeriveKey, RefusalsNeverQuoteThePassphrase) {
  try {
    derive_key(text("hunter2"), {0, 8192, kArgon2id13, kZeroSalt}, {});
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(std::string(error.what()).find("hunter2"), std::string::npos);
    EXPECT_NE(std::string(error.what()).find("opslimit"), std::string::npos);
  }
}

}  // namespace
}  // namespace tensorizer::crypto
