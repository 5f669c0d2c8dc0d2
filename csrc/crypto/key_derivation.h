// Passphrase to key: Argon2id v1.3 by libsodium. Pure but slow and memory-hungry by design.
// Source: docs/format.md, "Keys"; docs/encryption.md, "Limits".
#pragma once

#include <cstdint>
#include <span>

#include "crypto/secret_key.h"

namespace tensorizer::crypto {

// What a file may make this process spend. Adjustable by the caller, because the parameters come from the file.
struct DerivationLimits {
  uint64_t max_opslimit = 16;
  uint64_t max_memlimit = uint64_t{4} << 30;  // bytes
};

struct DerivationParams {
  uint64_t opslimit;
  uint64_t memlimit;
  int32_t algorithm;  // 2
  std::span<const std::byte> salt;  // 16 bytes
};

// Throws Error: crypto (algorithm, above `limits`), invalid_argument (outside libsodium's range, salt length),
// out_of_memory.
SecretKey derive_key(std::span<const std::byte> passphrase, const DerivationParams& params,
                     const DerivationLimits& limits);

}  // namespace tensorizer::crypto
