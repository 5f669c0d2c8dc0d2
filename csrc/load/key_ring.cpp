#include "load/key_ring.h"

#include "core/error.h"
#include "crypto/chunked_box.h"

namespace tensorizer::load {

KeyRing::KeyRing(std::shared_ptr<const crypto::SecretKey> key) : exact_(std::move(key)) {}

KeyRing::KeyRing(std::span<const std::byte> passphrase, const crypto::DerivationLimits& limits)
    : passphrase_(passphrase.begin(), passphrase.end()), limits_(limits) {}

KeyRing::~KeyRing() { crypto::wipe(passphrase_); }

std::shared_ptr<const crypto::SecretKey> KeyRing::key_for(const format::CryptInfo& info) {
  if (exact_) return exact_;
  if (info.derivations.size() != 1)
    throw Error(Errc::crypto, info.derivations.empty()
                                  ? "was encrypted with an exact key, but a passphrase was given"
                                  : "names " + std::to_string(info.derivations.size()) +
                                        " key derivations where exactly one is legal");
  const format::KeyDerivation& wanted = info.derivations.front();
  MutexLock lock(mutex_);
  for (const Derived& known : derived_) {
    if (known.params == wanted) return known.key;
  }
  if (derived_.size() >= limits_.max_derivations)
    throw Error(Errc::crypto,
                "needs more than the " + std::to_string(limits_.max_derivations) +
                    " derived keys that one load allows (raise max_derivations of the "
                    "DecryptionParams if this file is to be trusted)");
  const crypto::DerivationParams params{wanted.opslimit, wanted.memlimit, wanted.algorithm,
                                        wanted.salt};
  std::shared_ptr<const crypto::SecretKey> key;
  try {
    key =
        std::make_shared<const crypto::SecretKey>(crypto::derive_key(passphrase_, params, limits_));
  } catch (const Error& error) {
    // The parameters are the file's, and no argument of the caller.
    if (error.code() == Errc::invalid_argument) throw Error(Errc::crypto, error.what());
    throw;
  }
  derived_.push_back({wanted, key});
  return key;
}

}  // namespace tensorizer::load
