#include "crypto/key_derivation.h"

#include <sodium.h>

#include <string>

#include "core/error.h"
#include "crypto/sodium.h"

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
                                  std::to_string(params.algorithm) + ", wanted " +
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

}  // namespace tensorizer::crypto
