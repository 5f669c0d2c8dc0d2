#include "load/sealed_metadata.h"

#include "core/byte_cursor.h"
#include "core/error.h"
#include "crypto/chunked_box.h"
#include "format/crypt_info.h"
#include "load/authenticity.h"

namespace tensorizer::load {

format::Annex open_sealed(const OpenedIndex& opened, KeyRing& keys) {
  ByteCursor cursor(opened.annex->sealed, "sealed metadata");
  const auto nbytes = cursor.read_le<uint64_t>("crypt_info length");
  const format::CryptInfo info = format::parse_crypt_info(cursor.take(nbytes, "crypt_info"), 0);
  const auto cipher = cursor.take(cursor.remaining(), "ciphertext");
  if (!info.cipher || info.cipher->macs.size() != crypto::kMacNbytes)
    throw Error(Errc::crypto, "sealed metadata: wanted one message with one authentication code");
  std::vector<std::byte> plain(cipher.size());
  const auto mac = info.cipher->macs.first<crypto::kMacNbytes>();
  if (!crypto::open(plain, cipher, mac, crypto::NonceView(info.cipher->nonce),
                    *key_of(opened, keys, info)))
    throw Error(
        Errc::crypto,
        "sealed metadata does not match its authentication code: wrong key, or the file was "
        "altered");
  return format::parse_sealed(plain);
}

}  // namespace tensorizer::load
