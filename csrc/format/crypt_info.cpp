#include "format/crypt_info.h"

#include <algorithm>

#include "core/byte_cursor.h"
#include "core/byte_writer.h"
#include "core/checked_math.h"
#include "core/error.h"

namespace tensorizer::format {
namespace {

constexpr uint16_t kKeyDerivationChunk = 1;
constexpr uint16_t kParallelChunk = 2;
constexpr uint16_t kSequentialChunk = 3;
constexpr uint16_t kPwhashMethod = 1;

constexpr uint64_t kChunkNbytesMultiple = 64;

// Bytes of a chunk behind its length, salt or MACs included.
constexpr uint64_t kDerivationChunkNbytes = kDerivationNbytes - 8;
constexpr uint64_t kCipherChunkFixedNbytes = 2 + 8 + kNonceNbytes + 8;
constexpr uint64_t kMessageChunkNbytes = 2 + kNonceNbytes + kMacNbytes;

Nonce read_nonce(ByteCursor& cursor) {
  Nonce nonce;
  std::ranges::copy(cursor.take(kNonceNbytes, "nonce"), nonce.begin());
  return nonce;
}

KeyDerivation parse_derivation(ByteCursor& cursor) {
  KeyDerivation derivation;
  derivation.method = cursor.read_le<uint16_t>("derivation method");
  if (derivation.method != kPwhashMethod) {
    cursor.fail("derivation method",
                "key derivation method " + std::to_string(derivation.method) + " is not known");
  }
  derivation.opslimit = cursor.read_le<uint64_t>("opslimit");
  derivation.memlimit = cursor.read_le<uint64_t>("memlimit");
  derivation.algorithm = cursor.read_le<int32_t>("algorithm");
  const auto salt = cursor.take(cursor.read_le<uint16_t>("salt length"), "salt");
  derivation.salt.assign(salt.begin(), salt.end());
  return derivation;
}

CipherChunks parse_parallel(ByteCursor& cursor) {
  CipherChunks cipher;
  cipher.chunk_nbytes = cursor.read_le<uint64_t>("chunk size");
  if (cipher.chunk_nbytes < kMinChunkNbytes || cipher.chunk_nbytes % kChunkNbytesMultiple != 0) {
    cursor.fail("chunk size", "cipher chunk size " + std::to_string(cipher.chunk_nbytes) +
                                  " is not a multiple of 64 from 1024 up");
  }
  cipher.nonce = read_nonce(cursor);
  const auto count = cursor.read_le<uint64_t>("MAC count");
  cipher.macs = cursor.take(checked_mul(count, kMacNbytes).value_or(UINT64_MAX), "MACs");
  return cipher;
}

CipherChunks parse_sequential(ByteCursor& cursor) {
  CipherChunks cipher;
  cipher.nonce = read_nonce(cursor);
  cipher.macs = cursor.take(kMacNbytes, "MAC");
  return cipher;
}

void parse_chunk(ByteCursor& cursor, CryptInfo& info) {
  const auto type = cursor.read_le<uint16_t>("chunk type");
  if (type == kKeyDerivationChunk) {
    info.derivations.push_back(parse_derivation(cursor));
    return;
  }
  if (type != kParallelChunk && type != kSequentialChunk) {
    cursor.fail("chunk type",
                "chunk type " + std::to_string(type) + " is not known, 1, 2 and 3 are");
  }
  CipherChunks cipher = type == kParallelChunk ? parse_parallel(cursor) : parse_sequential(cursor);
  if (info.cipher) {
    throw Error(Errc::crypto, "crypt_info: more than one cipher chunk", {}, cursor.offset());
  }
  info.cipher = cipher;
}

// Bytes of a block with its prefix, of whose cipher chunk so many follow its length.
uint64_t block_nbytes(bool derivation, uint64_t chunk_nbytes) noexcept {
  return 8 + 2 + (derivation ? kDerivationNbytes : 0) + 8 + chunk_nbytes;
}

// The block up to the length of its cipher chunk.
std::vector<std::byte> begin_block(const std::optional<KeyDerivation>& derivation,
                                   uint64_t chunk_nbytes) {
  const uint64_t nbytes = block_nbytes(derivation.has_value(), chunk_nbytes);
  std::vector<std::byte> block;
  block.reserve(nbytes);
  ByteWriter out(block);
  out.put(uint64_t{nbytes - 8});
  out.put(static_cast<uint16_t>(derivation ? 2 : 1));
  if (derivation) put_derivation(out, *derivation);
  out.put(chunk_nbytes);
  return block;
}

}  // namespace

void put_derivation(ByteWriter& out, const KeyDerivation& derivation) {
  if (derivation.salt.size() != kSaltNbytes) {
    throw Error(Errc::invalid_argument, "a salt has " + std::to_string(kSaltNbytes) +
                                            " bytes, not " +
                                            std::to_string(derivation.salt.size()));
  }
  out.put(uint64_t{kDerivationChunkNbytes});
  out.put(kKeyDerivationChunk);
  out.put(derivation.method);
  out.put(derivation.opslimit);
  out.put(derivation.memlimit);
  out.put(derivation.algorithm);
  out.put(static_cast<uint16_t>(derivation.salt.size()));
  out.put_bytes(derivation.salt);
}

KeyDerivation read_derivation(ByteCursor& cursor) {
  const uint64_t at = cursor.offset();
  const auto nbytes = cursor.read_le<uint64_t>("chunk length");
  ByteCursor chunk(cursor.take(nbytes, "key derivation"), "key derivation", at + sizeof nbytes);
  if (chunk.read_le<uint16_t>("chunk type") != kKeyDerivationChunk)
    cursor.fail("chunk type", "no key derivation");
  KeyDerivation derivation = parse_derivation(chunk);
  if (chunk.remaining() > 0 || derivation.salt.size() != kSaltNbytes)
    cursor.fail("key derivation", "its length is not that of a salt of 16 bytes");
  return derivation;
}

CryptInfo parse_crypt_info(std::span<const std::byte> block, uint64_t origin) {
  ByteCursor cursor(block, "crypt_info", origin);
  CryptInfo info;
  const auto count = cursor.read_le<uint16_t>("chunk count");
  for (uint16_t i = 0; i < count; ++i) {
    const auto nbytes = cursor.read_le<uint64_t>("chunk length");
    const uint64_t at = cursor.offset();
    // Bytes behind the fields of a chunk, and behind the last chunk, are ignored.
    ByteCursor chunk(cursor.take(nbytes, "chunk"), "crypt_info chunk", at);
    parse_chunk(chunk, info);
  }
  if (count > 0 && !info.cipher) {
    throw Error(Errc::crypto, "crypt_info: chunks, but none that says how the data is encrypted",
                {}, origin);
  }
  return info;
}

uint64_t check_crypt_info(const CryptInfo& info, uint64_t data_nbytes) {
  if (data_nbytes == 0) return 0;
  if (!info.cipher) {
    throw Error(Errc::crypto, "data that is not encrypted, in an encrypted file");
  }
  const uint64_t macs = info.cipher->mac_count();
  if (macs == 1) return data_nbytes;  // one message, whatever the chunk size says
  const uint64_t wanted = ceil_div(data_nbytes, info.cipher->chunk_nbytes);
  if (macs != wanted) {
    throw Error(Errc::malformed, "crypt_info: " + std::to_string(macs) + " MACs, " +
                                     std::to_string(data_nbytes) + " bytes in chunks of " +
                                     std::to_string(info.cipher->chunk_nbytes) + " want " +
                                     std::to_string(wanted));
  }
  return info.cipher->chunk_nbytes;
}

std::vector<std::byte> serialize_crypt_info(const std::optional<KeyDerivation>& derivation,
                                            const Nonce& nonce, uint64_t macs) {
  std::vector<std::byte> block =
      begin_block(derivation, kCipherChunkFixedNbytes + kMacNbytes * macs);
  ByteWriter out(block);
  out.put(kParallelChunk);
  out.put(uint64_t{kCipherChunkNbytes});
  out.put_bytes(nonce);
  out.put(uint64_t{macs});
  out.put_zeros(kMacNbytes * macs);
  return block;
}

uint64_t message_crypt_info_nbytes(bool derivation) noexcept {
  return block_nbytes(derivation, kMessageChunkNbytes);
}

std::vector<std::byte> serialize_message_crypt_info(const std::optional<KeyDerivation>& derivation,
                                                    const Nonce& nonce,
                                                    std::span<const std::byte, kMacNbytes> mac) {
  std::vector<std::byte> block = begin_block(derivation, kMessageChunkNbytes);
  ByteWriter out(block);
  out.put(kSequentialChunk);
  out.put_bytes(nonce);
  out.put_bytes(mac);
  return block;
}

std::vector<std::byte> serialize_empty_crypt_info() {
  std::vector<std::byte> block;
  ByteWriter out(block);
  out.put(uint64_t{2});
  out.put(uint16_t{0});
  return block;
}

}  // namespace tensorizer::format
