// The keys of one load: one exact key, or a passphrase whose derived keys are cached by their
// parameters. Internally locked; secrets are wiped with it.
#pragma once

#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/sync.h"
#include "crypto/key_derivation.h"
#include "crypto/secret_key.h"
#include "format/crypt_info.h"

namespace tensorizer::load {

class KeyRing {
 public:
  explicit KeyRing(std::shared_ptr<const crypto::SecretKey> key);
  KeyRing(std::span<const std::byte> passphrase, const crypto::DerivationLimits& limits);
  ~KeyRing();
  KeyRing(const KeyRing&) = delete;
  KeyRing& operator=(const KeyRing&) = delete;

  // The key for a record, or for all of a file, by the derivations that it names. With an exact key
  // they are ignored; with a passphrase
  // exactly one is needed. Derives at most once per distinct parameters (others wait meanwhile).
  // Throws Error: crypto, out_of_memory.
  std::shared_ptr<const crypto::SecretKey> key_for(
      std::span<const format::KeyDerivation> derivations);

  // Whether a nonce has the mark of `key`, which key_for() has returned.
  bool has_marked(const format::Nonce& nonce, const crypto::SecretKey& key);

 private:
  struct Derived {
    format::KeyDerivation params;
    std::shared_ptr<const crypto::SecretKey> key;
  };

  std::shared_ptr<const crypto::SecretKey> exact_;
  std::vector<std::byte> passphrase_;
  crypto::DerivationLimits limits_;
  Mutex mutex_;
  std::vector<Derived> derived_ GUARDED_BY(mutex_);
  std::map<const crypto::SecretKey*, crypto::SecretKey> mark_keys_ GUARDED_BY(mutex_);
};

}  // namespace tensorizer::load
