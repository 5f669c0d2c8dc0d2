// Tags and signatures: the test vectors of docs/format.md 12.5 to the byte, and sections that
// are not as they should be.
#include "bytes.h"
#include "crypto/authentication.h"
#include "format/annex.h"
#include "format_reading.h"

namespace tensorizer::format {
namespace {

using testing::Build;
using testing::Bytes;
using testing::expect_error;
using testing::from_hex;
using testing::to_hex;

crypto::SecretKey vector_key() {
  return crypto::SecretKey(
      from_hex("000102030405060708090A0B0C0D0E0F101112131415161718191A1B1C1D1E1F"));
}

std::string sha256_hex(std::span<const std::byte> bytes) {
  digest::Sha256 sha;
  sha.update(bytes);
  return to_hex(sha.finish());
}

Nonce vector_nonce() {
  Nonce nonce{};
  for (size_t i = 0; i < 16; ++i) nonce[i] = static_cast<std::byte>(0x40 + i);
  crypto::mark_nonce(nonce, crypto::derive_subkey(vector_key(), crypto::KeyUse::mark));
  return nonce;
}

Signature sign(const digest::Sha256Digest& digest, const crypto::Signer& signer) {
  return {signer.public_key(), signer.sign(crypto::signed_message(digest))};
}

// The file of docs/format.md 12.1: one tensor `w`, float32, [2]; or the same, encrypted.
Bytes write_vector(bool encrypted, Bytes* annex_out) {
  const Bytes payload = from_hex("0000803F 000020C0");
  const uint64_t dims[] = {2};
  Bytes crypt_info;
  if (encrypted) crypt_info = serialize_crypt_info(std::nullopt, vector_nonce(), 1);
  const HeaderToWrite header{.module_idx = 0,
                             .type = TensorType::state_dict,
                             .name = "w",
                             .dtype = "<f4",
                             .shape = dims,
                             .wide_dims = false,
                             .hashes = {.crc32 = !encrypted, .sha256 = true},
                             .has_crypt_info = encrypted,
                             .crypt_info = crypt_info,
                             .data_nbytes = 8};
  HeaderLayout layout = serialize_record_header(header, encrypted ? 192 : 128);
  digest::HeaderDigest digest = digest_header(layout, header.hashes);
  if (layout.crc32_at != 0)
    store_le(&layout.bytes[layout.crc32_at], digest::crc32(digest.crc32, payload));
  digest.sha256.update(payload);
  std::ranges::copy(digest.sha256.finish(),
                    layout.bytes.begin() + static_cast<long>(layout.sha256_at));
  Bytes stored = payload;
  if (encrypted) {
    std::array<std::byte, kMacNbytes> mac;
    crypto::seal(stored, mac, payload, crypto::NonceView(vector_nonce()), vector_key());
    EXPECT_EQ(to_hex(mac), "049ff52c77085c37e88d63dd60d02b05");
    EXPECT_EQ(to_hex(stored), "d276c37757c26507");
    std::ranges::copy(mac, layout.bytes.begin() + static_cast<long>(layout.macs_at));
  }
  Prologue prologue;
  prologue.version = encrypted ? 3 : 1;
  prologue.tensor_size = 8;
  prologue.tensor_count = 1;
  prologue.metadata_nbytes = 4096 - kPrologueNbytes;
  const auto head = serialize_prologue(prologue);
  Bytes index;
  append_index_entry(
      index, {"w", "<f4", dims, TensorType::state_dict, 4096, 4096 + layout.bytes.size(), 8},
      false);
  digest::Sha256 of_header;
  of_header.update(layout.bytes);
  const std::vector<digest::Sha256Digest> records{of_header.finish()};
  const crypto::SeedSigner signer(vector_key());
  const auto sign_digest = [&](const digest::Sha256Digest& index_digest) {
    Signatures signatures;
    if (encrypted) {
      const auto key = crypto::derive_subkey(vector_key(), crypto::KeyUse::tag);
      signatures.tag = {.derivation = {}, .tag = crypto::make_tag(index_digest, key)};
    } else {
      signatures.signatures.push_back(sign(index_digest, signer));
    }
    return signatures;
  };
  AnnexToWrite annex;
  annex.records = records;
  *annex_out = serialize_annex(annex, {}, digest_index(head, index), sign_digest);
  EXPECT_EQ(annex_out->size(),
            annex_nbytes(annex, 0, 1, {.tag = encrypted, .signatures = encrypted ? 0U : 1U}));
  Build file;
  file.raw(head).raw(index).raw(*annex_out);
  file.zeros(4096 - file.bytes().size()).raw(layout.bytes).raw(stored).zeros(8);
  return file.bytes();
}

TEST(Authentication, DerivesTheKeysOfTheVectors) {
  const auto hex = [](crypto::KeyUse use) {
    return to_hex(crypto::derive_subkey(vector_key(), use).bytes());
  };
  EXPECT_EQ(hex(crypto::KeyUse::tag),
            "043992dd6482ffa3dc8c216b048a175c86d9cd79a211a9a578f2090ce25220ea");
  EXPECT_EQ(hex(crypto::KeyUse::mark),
            "3962c3f99b1eee7a8134e45eea8b72b9b7a3e682b04b1c03d690ebf720f8acf8");
  EXPECT_EQ(hex(crypto::KeyUse::marker),
            "95eeb6f74e2238b6f0b2b8bc3f5c6e5a06aac14d72cf07600f41d3bd1b823cac");
}

TEST(Authentication, MarksTheNonceOfTheVectors) {
  const Nonce nonce = vector_nonce();
  EXPECT_EQ(to_hex(nonce), "404142434445464748494a4b4c4d4e4f65c297a3d9e11250");
  const auto key = crypto::derive_subkey(vector_key(), crypto::KeyUse::mark);
  EXPECT_TRUE(crypto::is_marked(nonce, key));
  for (size_t i = 0; i < nonce.size(); ++i) {
    Nonce other = nonce;
    other[i] ^= std::byte{1};
    EXPECT_FALSE(crypto::is_marked(other, key)) << i;
  }
}

TEST(Authentication, WritesTheSignedPlainFileOfTheVectors) {
  Bytes annex;
  const Bytes file = write_vector(false, &annex);
  EXPECT_EQ(to_hex(annex),
            "545a52414e4e5831b2000000"
            "050020000000fa15805cac6ebea817ae3655d4676edcfd3892137bb26c6a2eaca22039ec61de"
            "040020000000bdf4a00a6a2de6482343c8716811300fa30081a8fdfabf217588c44b259e283f"
            "07006000000003a107bff3ce10be1d70dd18e74bc09967e4d6309ba50d5f1ddc8664125531b8"
            "fd6dfa482fe80d3cc228257564c00c093ea418a8979dec248128b9b76a494fb5"
            "a8a0ef2c901c1cbe0ff7ec3e6a2aa0fbb8817c58f117e2773b8afa4344c1a20c"
            "67725b1e");
  EXPECT_EQ(sha256_hex(annex), "7b2b7e062b97806a8e9fcf7d845b855b56b658aa4a3a8d40f7fa8117b2eea9b4");
  EXPECT_EQ(file.size(), 4240U);
  EXPECT_EQ(sha256_hex(file), "6b54b2217ba68b08ef29c7f664bda40f09973fca221c07725b5977091cac636d");
}

TEST(Authentication, WritesTheAuthenticatedFileOfTheVectors) {
  Bytes annex;
  const Bytes file = write_vector(true, &annex);
  EXPECT_EQ(to_hex(annex),
            "545a52414e4e583174000000"
            "05002000000034a9a16225f366fb54efee9ff9c85a25de2b25f8d875eb2a0ef13690ac31f325"
            "0400200000008c3ef184e7ed19147f4fd777aef9cc5215f1f60c7d4c282f731c73883f7a735c"
            "060022000000"
            "01001681cc6ec90b1876e303343fdce3e9ae0d0beb9d5be7f5cb49709037de431e7b"
            "f9a3c6bc");
  EXPECT_EQ(file.size(), 4304U);
  EXPECT_EQ(sha256_hex(file), "1d5417bc2fae16384ec328c97f9aee917f7a6df6e34c0ebc7b491953d43968fc");
}

TEST(Authentication, SignaturesFitTheirMessageAndKeyAlone) {
  const crypto::SeedSigner signer(vector_key()), other(crypto::SecretKey::random());
  EXPECT_EQ(to_hex(signer.public_key()),
            "03a107bff3ce10be1d70dd18e74bc09967e4d6309ba50d5f1ddc8664125531b8");
  const auto message = from_hex("00112233");
  crypto::SignatureBytes signature = signer.sign(message);
  EXPECT_TRUE(crypto::verify(signature, message, signer.public_key()));
  EXPECT_FALSE(crypto::verify(signature, message, other.public_key()));
  EXPECT_FALSE(crypto::verify(signature, from_hex("00112234"), signer.public_key()));
  signature[40] ^= std::byte{1};
  EXPECT_FALSE(crypto::verify(signature, message, signer.public_key()));
}

TEST(Authentication, SmallOrderAndNonCanonicalKeysAreNone) {
  crypto::PublicKeyBytes key{};
  EXPECT_FALSE(crypto::is_public_key(key));  // order 4
  key[0] = std::byte{1};
  EXPECT_FALSE(crypto::is_public_key(key));  // the neutral element
  key.fill(std::byte{0xFF});
  EXPECT_FALSE(crypto::is_public_key(key));  // above the field's order
  EXPECT_FALSE(crypto::verify({}, {}, key));
  EXPECT_TRUE(crypto::is_public_key(crypto::SeedSigner(vector_key()).public_key()));
}

// --- sections ---

Bytes section(uint8_t type, const Bytes& body) {
  return Build().le(type).le(uint8_t{0}).le(static_cast<uint32_t>(body.size())).raw(body);
}

Bytes framed(std::initializer_list<Bytes> sections) {
  Build all;
  for (const Bytes& one : sections) all.raw(one);
  Build out;
  out.text("TZRANNX1").le(static_cast<uint32_t>(all.bytes().size())).raw(all.bytes());
  return out.le(digest::crc32(0, out.bytes())).bytes();
}

const Bytes kRecords = section(5, Bytes(64));  // of two entries
const Bytes kDigest = section(4, Bytes(32));
const Bytes kTies = section(2, testing::from_text("{}"));
Bytes tag(uint8_t algorithm = 1, uint8_t kind = 0, size_t more = 32) {
  return section(6, Build().le(algorithm).le(kind).zeros(more));
}
Bytes signatures(size_t nbytes) { return section(7, Bytes(nbytes)); }

std::optional<Annex> parse(std::initializer_list<Bytes> sections) {
  return parse_annex(framed(sections), 0, 2, [] { return digest::Sha256(); });
}
std::string fault(std::initializer_list<Bytes> sections, Errc code = Errc::malformed) {
  return expect_error(code, [&] { parse(sections); });
}

TEST(Authentication, SectionsInOrderAreRead) {
  const auto annex = parse({kTies, kRecords, kDigest, tag(), signatures(192)});
  EXPECT_EQ(annex->records.size(), 2U);
  EXPECT_TRUE(annex->tag && !annex->tag->derivation);
  EXPECT_EQ(annex->signatures.size(), 2U);
}

TEST(Authentication, RecordDigestsAreAsManyAsEntries) {
  EXPECT_TRUE(parse({kRecords}));
  fault({section(5, Bytes(32))});
  fault({section(5, Bytes(65))});
  fault({section(5, {})});
}

TEST(Authentication, TagsAndSignaturesWantTheDigestsInFront) {
  for (const Bytes& authenticating : {tag(), signatures(96)}) {
    fault({authenticating});
    fault({kRecords, authenticating});
    fault({kDigest, authenticating});
    fault({authenticating, kRecords, kDigest});
    EXPECT_TRUE(parse({kRecords, kDigest, authenticating}));
  }
}

TEST(Authentication, NothingIsAddedBehindTheDigestOfAnAuthenticatedFile) {
  EXPECT_TRUE(parse({kRecords, kDigest, kTies}));
  fault({kRecords, kDigest, kTies, tag()});
  fault({kRecords, kDigest, tag(), kTies});
  fault({kRecords, kDigest, signatures(96), kTies});
  fault({kDigest, kRecords, tag()});
}

TEST(Authentication, TagsOfOtherLengthsAreMalformedAndOtherAlgorithmsARefusedKey) {
  fault({kRecords, kDigest, section(6, {})});
  fault({kRecords, kDigest, tag(1, 0, 31)});
  fault({kRecords, kDigest, tag(1, 0, 33)});
  fault({kRecords, kDigest, tag(1, 2)});
  fault({kRecords, kDigest, tag(1, 1, 82)});  // no derivation where one should be
  fault({kRecords, kDigest, tag(2)}, Errc::crypto);
}

TEST(Authentication, TagsSayHowTheKeyIsDerived) {
  FileTag written;
  written.derivation = KeyDerivation{.opslimit = 3, .memlimit = 8192, .salt = Bytes(16)};
  const std::vector<digest::Sha256Digest> records(2);
  AnnexToWrite annex;
  annex.records = records;
  const Bytes bytes = serialize_annex(annex, {}, digest::Sha256(),
                                      [&](const auto&) { return Signatures{written, {}}; });
  EXPECT_EQ(bytes.size(), annex_nbytes(annex, 0, 2, {.tag = true, .derivation = true}));
  EXPECT_EQ(bytes.size(), 150U + 32 * 2);
  const auto parsed = parse_annex(bytes, 0, 2, [] { return digest::Sha256(); });
  EXPECT_EQ(parsed->tag->derivation, written.derivation);
}

TEST(Authentication, OneToSixteenSignaturesAreLegal) {
  EXPECT_EQ(parse({kRecords, kDigest, signatures(96 * 16)})->signatures.size(), 16U);
  fault({kRecords, kDigest, signatures(96 * 17)});
  fault({kRecords, kDigest, signatures(95)});
  fault({kRecords, kDigest, signatures(0)});
}

TEST(Authentication, DetachedSignaturesHoldNothingElse) {
  const auto detached = [](const Bytes& file) { return parse_detached(file, digest::Sha256()); };
  Bytes good = framed({kRecords, kDigest, signatures(96)});
  EXPECT_EQ(detached(good).signatures.size(), 1U);
  const auto refused = [&](const Bytes& file) {
    expect_error(Errc::malformed, [&] { detached(file); });
  };
  good.push_back(std::byte{0});
  refused(good);
  refused({});
  refused(testing::from_text("TZRANNX2 and so on"));
  refused(framed({kRecords, kDigest}));
  refused(framed({kRecords, kDigest, tag(), signatures(96)}));
  refused(framed({kTies, kRecords, kDigest, signatures(96)}));
}

}  // namespace
}  // namespace tensorizer::format
