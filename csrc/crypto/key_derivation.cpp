#include "crypto/key_derivation.h"

#include <sodium.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <string_view>

#include "core/error.h"
#include "core/wipe.h"
#include "crypto/secret_key.h"

namespace tensorizer::crypto {
namespace {

static_assert(kArgon2id13 == crypto_pwhash_ALG_ARGON2ID13);
static_assert(kSaltNbytes == crypto_pwhash_SALTBYTES);
static_assert(kKeyNbytes >= crypto_pwhash_BYTES_MIN);
static_assert(kMinOpslimit == crypto_pwhash_OPSLIMIT_MIN);
static_assert(kMaxOpslimit == crypto_pwhash_OPSLIMIT_MAX);
static_assert(kMinMemlimit == crypto_pwhash_MEMLIMIT_MIN);

void check_range(const char* name, uint64_t value, uint64_t min, uint64_t max) {
  if (value >= min && value <= max) return;
  throw Error(Errc::invalid_argument, std::string("key derivation: ") + name + " must be between " +
                                          std::to_string(min) + " and " + std::to_string(max) +
                                          ", got " + std::to_string(value));
}

void check_limit(const char* name, uint64_t value, uint64_t limit) {
  if (value <= limit) return;
  throw Error(Errc::crypto, std::string("key derivation refused: ") + name + " " +
                                std::to_string(value) + " is above the limit of " +
                                std::to_string(limit) + " (raise max_" + name +
                                " of the DecryptionParams if this file is to be trusted)");
}

void check(const DerivationParams& params, const DerivationLimits& limits) {
  if (params.algorithm != kArgon2id13) {
    throw Error(Errc::crypto, "key derivation: unknown algorithm " +
                                  std::to_string(params.algorithm) + ", expected " +
                                  std::to_string(kArgon2id13) + " (Argon2id v1.3)");
  }
  check_range("opslimit", params.opslimit, kMinOpslimit, kMaxOpslimit);
  check_range("memlimit", params.memlimit, kMinMemlimit, kMaxMemlimit);
  if (params.salt.size() != kSaltNbytes) {
    throw Error(Errc::invalid_argument, "key derivation: salt must be " +
                                            std::to_string(kSaltNbytes) + " bytes, got " +
                                            std::to_string(params.salt.size()));
  }
  check_limit("opslimit", params.opslimit, limits.max_opslimit);
  check_limit("memlimit", params.memlimit, limits.max_memlimit);
}

}  // namespace

SecretKey derive_key(std::span<const std::byte> passphrase, const DerivationParams& params,
                     const DerivationLimits& limits) {
  require_sodium();
  check(params, limits);
  if (passphrase.size() > crypto_pwhash_PASSWD_MAX) {
    throw Error(Errc::invalid_argument, "key derivation: passphrase longer than 2^32 - 1 bytes");
  }
  return SecretKey::filled_by([&](std::span<std::byte, kKeyNbytes> key) {
    const char empty = 0;
    const char* text =
        passphrase.empty() ? &empty : reinterpret_cast<const char*>(passphrase.data());
    const int failed =
        crypto_pwhash(reinterpret_cast<unsigned char*>(key.data()), key.size(), text,
                      passphrase.size(), reinterpret_cast<const unsigned char*>(params.salt.data()),
                      params.opslimit, params.memlimit, params.algorithm);
    // Every parameter has been checked, so only the allocation of memlimit bytes can have failed.
    if (failed != 0) {
      throw Error(Errc::crypto, "key derivation: not enough memory for memlimit " +
                                    std::to_string(params.memlimit));
    }
  });
}

namespace {

constexpr std::string_view kBegin = "-----BEGIN PRIVATE KEY-----";
constexpr std::string_view kEnd = "-----END PRIVATE KEY-----";
constexpr const char* kSpaces = " \t\r\n";
// PKCS#8, version 1: the algorithm's identifier, then the seed in two octet strings.
constexpr std::array<unsigned char, 16> kBeforeSeed{0x30, 0x2E, 0x02, 0x01, 0x00, 0x30, 0x05, 0x06,
                                                    0x03, 0x2B, 0x65, 0x70, 0x04, 0x22, 0x04, 0x20};
constexpr size_t kMaxDerNbytes = 8192;  // keys of other algorithms are to be told apart

[[noreturn]] void refuse(const std::string& found) {
  throw Error(
      Errc::invalid_argument,
      "expected an Ed25519 key: a PEM file with PRIVATE KEY, or 64 hexadecimal digits; got " +
          found);
}

template <class Buffer>
struct Wiped {
  Buffer bytes{};
  Wiped() = default;
  Wiped(const Wiped&) = delete;
  Wiped& operator=(const Wiped&) = delete;
  ~Wiped() { wipe(bytes.data(), bytes.size()); }
};

SecretKey from_pem(std::string_view body) {
  Wiped<std::array<unsigned char, kMaxDerNbytes>> der;
  size_t nbytes = 0;
  if (sodium_base642bin(der.bytes.data(), der.bytes.size(), body.data(), body.size(), kSpaces,
                        &nbytes, nullptr, sodium_base64_VARIANT_ORIGINAL) != 0)
    refuse("a PEM file that is damaged");
  if (nbytes != kBeforeSeed.size() + kKeyNbytes ||
      !std::equal(kBeforeSeed.begin(), kBeforeSeed.end(), der.bytes.begin()))
    refuse("a key of another algorithm");
  return SecretKey(std::as_bytes(std::span(der.bytes)).subspan(kBeforeSeed.size(), kKeyNbytes));
}

}  // namespace

SecretKey read_seed(std::span<const std::byte> bytes) {
  require_sodium();
  std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  if (text.find("BEGIN ENCRYPTED PRIVATE KEY") != std::string_view::npos)
    refuse("an encrypted PEM file (openssl pkey decrypts it)");
  const size_t begin = text.find(kBegin);
  const size_t end = text.find(kEnd);
  if (begin != std::string_view::npos && end != std::string_view::npos && begin < end)
    return from_pem(text.substr(begin + kBegin.size(), end - begin - kBegin.size()));
  if (text.find("-----BEGIN ") != std::string_view::npos) refuse("a PEM file of something else");
  const size_t first = text.find_first_not_of(kSpaces);
  if (first == std::string_view::npos) refuse("nothing");
  text = text.substr(first, text.find_last_not_of(kSpaces) + 1 - first);
  Wiped<std::array<unsigned char, kKeyNbytes>> seed;
  size_t nbytes = 0;
  if (text.size() != 2 * kKeyNbytes ||
      sodium_hex2bin(seed.bytes.data(), seed.bytes.size(), text.data(), text.size(), nullptr,
                     &nbytes, nullptr) != 0 ||
      nbytes != kKeyNbytes)
    refuse("something else");
  return SecretKey(std::as_bytes(std::span(seed.bytes)));
}

}  // namespace tensorizer::crypto
