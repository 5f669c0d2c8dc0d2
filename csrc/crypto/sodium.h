// libsodium's one-time initialisation. Any thread, any number of times.
#pragma once

namespace tensorizer::crypto {

// Throws Error(crypto) when libsodium cannot start (no source of randomness).
void require_sodium();

}  // namespace tensorizer::crypto
