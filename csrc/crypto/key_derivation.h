// Keys from what users have: a passphrase (Argon2id v1.3 by libsodium; pure but slow and
// memory-hungry by design), or the text of a key file.
// Source: docs/format.md, "Keys"; docs/encryption.md, "Limits".
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "core/format_sizes.h"
#include "crypto/secret_key.h"

namespace tensorizer::crypto {

inline constexpr int32_t kArgon2id13 = 2;

// What libsodium accepts at all; the named presets are in tensorizer/encryption.py.
inline constexpr uint64_t kMinOpslimit = 1;
inline constexpr uint64_t kMaxOpslimit = 4'294'967'295;
inline constexpr uint64_t kMinMemlimit = 8'192;
inline constexpr uint64_t kMaxMemlimit = 4'398'046'510'080;

// What a file may make this process spend. Adjustable by the caller, because the parameters come
// from the file. The defaults allow four times the passes and four times the memory of libsodium's
// most expensive preset.
struct DerivationLimits {
  uint64_t max_opslimit = 16;
  uint64_t max_memlimit = uint64_t{4} << 30;  // bytes
  uint64_t max_derivations = 16;  // different keys in one load; writers use one per file
};

// No limit beyond libsodium's own range: for parameters that the caller chose himself.
inline constexpr DerivationLimits kNoDerivationLimits{kMaxOpslimit, kMaxMemlimit, UINT64_MAX};

struct DerivationParams {
  uint64_t opslimit;                // passes over the memory
  uint64_t memlimit;                // bytes
  int32_t algorithm = kArgon2id13;  // 2, nothing else
  std::span<const std::byte> salt;  // 16 bytes
};

// Cannot be interrupted: libsodium offers no way. `limits` bounds the time instead.
// Throws Error: crypto (algorithm, above `limits`, not enough memory for memlimit),
// invalid_argument (outside libsodium's range, salt length). All checks come before the first byte
// of memory is taken.
SecretKey derive_key(std::span<const std::byte> passphrase, const DerivationParams& params,
                     const DerivationLimits& limits);

// The seed of an Ed25519 key in the text of a PEM file (RFC 8410: PRIVATE KEY, as `openssl genpkey
// -algorithm ed25519` writes it) or in 64 hexadecimal digits; leaves no copies behind. Throws
// Error(invalid_argument), which quotes nothing of the text: another algorithm, an encrypted key,
// no key at all.
SecretKey read_seed(std::span<const std::byte> text);

}  // namespace tensorizer::crypto
