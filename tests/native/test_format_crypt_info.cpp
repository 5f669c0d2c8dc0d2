#include "bytes.h"
#include "format/crypt_info.h"

namespace tensorizer::format {
namespace {

using testing::Build;
using testing::Bytes;
using testing::expect_error;
using testing::to_hex;

Bytes some_nonce() {
  Bytes nonce;
  for (int i = 0; i < 24; ++i) nonce.push_back(static_cast<std::byte>(0x40 + i));
  return nonce;
}

Build parallel(uint64_t macs, uint64_t chunk_nbytes = kCipherChunkNbytes) {
  return Build().le(uint16_t{2}).le(chunk_nbytes).raw(some_nonce()).le(macs).zeros(16 * macs);
}

Build sequential() { return Build().le(uint16_t{3}).raw(some_nonce()).zeros(16); }

Build derivation(uint16_t method = 1, uint16_t salt_nbytes = 16) {
  return Build()
      .le(uint16_t{1})
      .le(method)
      .le(uint64_t{3})
      .le(uint64_t{8192})
      .le(int32_t{2})
      .le(salt_nbytes)
      .zeros(salt_nbytes);
}

// A block without its length prefix.
Bytes block(const std::vector<Bytes>& chunks, size_t slack = 0) {
  Build out;
  out.le(static_cast<uint16_t>(chunks.size()));
  for (const Bytes& chunk : chunks) out.le(uint64_t{chunk.size()}).raw(chunk);
  return out.zeros(slack);
}

CryptInfo parse(const Bytes& bytes) { return parse_crypt_info(bytes, 500); }

TEST(CryptInfo, ChunksAreReadInAnyOrder) {
  for (const auto& chunks :
       std::vector<std::vector<Bytes>>{{derivation(), parallel(2)}, {parallel(2), derivation()}}) {
    const Bytes bytes = block(chunks);
    const CryptInfo info = parse(bytes);
    ASSERT_EQ(info.derivations.size(), 1u);
    EXPECT_EQ(info.derivations[0].opslimit, 3u);
    EXPECT_EQ(info.derivations[0].memlimit, 8192u);
    EXPECT_EQ(info.derivations[0].algorithm, 2);
    EXPECT_EQ(info.derivations[0].salt.size(), 16u);
    ASSERT_TRUE(info.cipher);
    EXPECT_EQ(info.cipher->mac_count(), 2u);
    EXPECT_EQ(to_hex(info.cipher->nonce), to_hex(some_nonce()));
  }
}

TEST(CryptInfo, NoChunksMeanNoEncryption) {
  const CryptInfo info = parse(block({}));
  EXPECT_TRUE(info.derivations.empty());
  EXPECT_FALSE(info.cipher);
  EXPECT_EQ(check_crypt_info(info, 0), 0u);
  expect_error(Errc::crypto, [&] { check_crypt_info(info, 1); });
}

TEST(CryptInfo, SpareBytesInChunksAndBlockAreIgnored) {
  EXPECT_EQ(parse(block({parallel(1).zeros(9), derivation().zeros(3)}, 5)).cipher->mac_count(), 1u);
}

TEST(CryptInfo, UnknownChunksAndMethodsAreMalformed) {
  expect_error(Errc::malformed, [] { parse(block({Build().le(uint16_t{0})})); });
  expect_error(Errc::malformed,
               [] { parse(block({parallel(1), Build().le(uint16_t{4}).zeros(40)})); });
  expect_error(Errc::malformed, [] { parse(block({parallel(1), derivation(2)})); });
}

TEST(CryptInfo, ChunkSizesAreMultiplesOf64From1024Up) {
  for (const uint64_t bad : {0ull, 63ull, 64ull, 960ull, 1023ull, 1030ull, 1056ull, ~0ull}) {
    expect_error(Errc::malformed, [&] { parse(block({parallel(1, bad)})); });
  }
  for (const uint64_t good : {1024ull, 1088ull, 65536ull, 2097152ull, 1ull << 63}) {
    const Bytes bytes = block({parallel(1, good)});
    EXPECT_EQ(parse(bytes).cipher->chunk_nbytes, good);
  }
}

TEST(CryptInfo, ExactlyOneCipherChunkIsWanted) {
  expect_error(Errc::crypto, [] { parse(block({derivation()})); });
  expect_error(Errc::crypto, [] { parse(block({parallel(1), parallel(1)})); });
  expect_error(Errc::crypto, [] { parse(block({parallel(1), sequential()})); });
}

TEST(CryptInfo, SeveralDerivationsAreForTheCallerToJudge) {
  EXPECT_EQ(parse(block({derivation(), parallel(1), derivation(1, 0)})).derivations.size(), 2u);
}

TEST(CryptInfo, LengthsBeyondTheBytesAreMalformedWhateverTheyClaim) {
  const Bytes whole = block({derivation(), parallel(3)});
  for (size_t n = 0; n < whole.size(); ++n) {
    expect_error(Errc::malformed,
                 [&] { parse(Bytes(whole.begin(), whole.begin() + static_cast<long>(n))); });
  }
  Build many;  // 2^60 MACs: 2^64 bytes
  many.le(uint16_t{2}).le(uint64_t{1024}).raw(some_nonce()).le(uint64_t{1} << 60).zeros(64);
  expect_error(Errc::malformed, [&] { parse(block({many})); });
  Build salty;
  salty.le(uint16_t{1}).le(uint16_t{1}).zeros(20).le(uint16_t{65535}).zeros(16);
  expect_error(Errc::malformed, [&] { parse(block({salty, parallel(1)})); });
  expect_error(Errc::malformed, [] { parse(Build().le(uint16_t{1}).le(~uint64_t{0}).zeros(60)); });
}

TEST(CryptInfo, TheNumberOfMacsFollowsFromTheData) {
  const auto check = [](uint64_t macs, uint64_t data) {
    const Bytes bytes = block({parallel(macs, 1024)});
    return check_crypt_info(parse(bytes), data);
  };
  EXPECT_EQ(check(2, 1025), 1024u);
  EXPECT_EQ(check(2, 2048), 1024u);
  EXPECT_EQ(check(1, 100), 100u);
  EXPECT_EQ(check(1, 1 << 20), uint64_t{1} << 20);  // one message, whatever the chunk size
  EXPECT_EQ(check(0, 0), 0u);
  EXPECT_EQ(check(3, 0), 0u);
  expect_error(Errc::malformed, [&] { check(2, 1024); });
  expect_error(Errc::malformed, [&] { check(2, 2049); });
  expect_error(Errc::malformed, [&] { check(0, 1); });
}

TEST(CryptInfo, ASequentialChunkIsOneMessage) {
  const Bytes bytes = block({sequential()});
  const CryptInfo info = parse(bytes);
  EXPECT_EQ(info.cipher->mac_count(), 1u);
  EXPECT_EQ(info.cipher->chunk_nbytes, 0u);
  EXPECT_EQ(check_crypt_info(info, 123456), 123456u);
}

TEST(CryptInfo, WhatIsWrittenParsesToWhatWasMeant) {
  Nonce nonce;
  std::ranges::copy(some_nonce(), nonce.begin());
  KeyDerivation key{1, 3, 268435456, 2, Bytes(16, std::byte{9})};
  for (const std::optional<KeyDerivation>& derived :
       {std::optional<KeyDerivation>(), std::optional(key)}) {
    for (const uint64_t macs : {0u, 1u, 2u, 77u}) {
      const Bytes bytes = serialize_crypt_info(derived, nonce, macs);
      EXPECT_EQ(bytes.size(), (derived ? 110 : 60) + 16 * macs);
      EXPECT_EQ(load_le<uint64_t>(bytes.data()), bytes.size() - 8);
      const CryptInfo info = parse_crypt_info(std::span(bytes).subspan(8), 0);
      EXPECT_EQ(info.derivations.size(), derived ? 1u : 0u);
      if (derived) {
        EXPECT_EQ(info.derivations[0], *derived);
      }
      EXPECT_EQ(info.cipher->nonce, nonce);
      EXPECT_EQ(info.cipher->chunk_nbytes, kCipherChunkNbytes);
      EXPECT_EQ(info.cipher->mac_count(), macs);
      if (macs > 0) {
        EXPECT_EQ(info.cipher->macs.data(), bytes.data() + (derived ? 110 : 60));
      }
    }
  }
  EXPECT_EQ(to_hex(serialize_empty_crypt_info()), "02000000000000000000");
  key.salt.resize(8);
  expect_error(Errc::invalid_argument, [&] { serialize_crypt_info(key, nonce, 1); });
}

TEST(CryptInfo, ThePublishedDerivationChunkComesOutByteForByte) {
  const KeyDerivation key{1, 1, 8192, 2, Bytes(16)};
  const Bytes bytes = serialize_crypt_info(key, Nonce{}, 1);
  EXPECT_EQ(to_hex(std::span(bytes).subspan(10, 50)),
            to_hex(testing::from_hex(
                "2A 00 00 00 00 00 00 00  01 00  01 00"
                "01 00 00 00 00 00 00 00  00 20 00 00 00 00 00 00"
                "02 00 00 00  10 00  00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00")));
}

}  // namespace
}  // namespace tensorizer::format
