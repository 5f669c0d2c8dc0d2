#include "crypto/sodium.h"

#include <sodium.h>

#include "core/error.h"

namespace tensorizer::crypto {

void require_sodium() {
  static const bool kReady = sodium_init() >= 0;  // 1: somebody else in the process did it before
  if (!kReady) throw Error(Errc::crypto, "libsodium could not be initialised");
}

}  // namespace tensorizer::crypto
