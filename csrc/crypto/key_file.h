// Private Ed25519 keys as files hold them, read without leaving copies behind.
// Source: RFC 8410; what `openssl genpkey -algorithm ed25519` writes.
#pragma once

#include <cstddef>
#include <span>

#include "crypto/secret_key.h"

namespace tensorizer::crypto {

// The seed in the text of a PEM file (PRIVATE KEY) or in 64 hexadecimal digits. Throws
// Error(invalid_argument), which quotes nothing of the text: another algorithm, an encrypted key,
// no key at all.
SecretKey read_seed(std::span<const std::byte> text);

}  // namespace tensorizer::crypto
