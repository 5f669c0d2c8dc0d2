#include "load/key_ring.h"

#include "core/error.h"
#include "core/wipe.h"
#include "crypto/authentication.h"
#include "crypto/chunked_box.h"

namespace tensorizer::load {

KeyRing::KeyRing(std::shared_ptr<const crypto::SecretKey> key) : exact_(std::move(key)) {}

KeyRing::KeyRing(std::span<const std::byte> passphrase, const crypto::DerivationLimits& limits)
    : passphrase_(passphrase.begin(), passphrase.end()), limits_(limits) {}

KeyRing::~KeyRing() { wipe(passphrase_.data(), passphrase_.size()); }

std::shared_ptr<const crypto::SecretKey> KeyRing::key_for(
    std::span<const format::KeyDerivation> derivations) {
  if (exact_) return exact_;
  if (derivations.size() != 1)
    throw Error(Errc::crypto, derivations.empty()
                                  ? "was encrypted with an exact key, but a passphrase was given"
                                  : "names " + std::to_string(derivations.size()) +
                                        " key derivations where exactly one is legal");
  const format::KeyDerivation& wanted = derivations.front();
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

bool KeyRing::has_marked(const format::Nonce& nonce, const crypto::SecretKey& key) {
  const crypto::SecretKey* mark_key = nullptr;
  {
    MutexLock lock(mutex_);
    auto known = mark_keys_.find(&key);
    if (known == mark_keys_.end())
      known = mark_keys_.emplace(&key, crypto::derive_subkey(key, crypto::KeyUse::mark)).first;
    mark_key = &known->second;  // nodes of a map stay where they are
  }
  return crypto::is_marked(crypto::NonceView(nonce), *mark_key);
}

}  // namespace tensorizer::load
