// The worked examples of docs/format.md, written field by field and compared byte for byte.
#include "bytes.h"
#include "core/checked_math.h"
#include "format_reading.h"

namespace tensorizer::format {
namespace {

using testing::Bytes;
using testing::from_hex;
using testing::to_hex;

constexpr uint64_t kReserved = 262144;  // the index that earlier releases reserve

std::string sha256_hex(std::span<const std::byte> bytes) {
  digest::Sha256 sha;
  sha.update(bytes);
  return to_hex(sha.finish());
}

struct Tensor {
  HeaderToWrite header;
  std::span<const std::byte> payload;
  // Filled in by write_file for what csrc/format does not do itself.
  std::span<const std::byte> mac = {};
  std::span<const std::byte> stored_payload = {};
};

// A file laid out like the examples: an index with slack, records whose payloads are aligned by
// their headers, a terminator.
Bytes write_file(Prologue prologue, const std::vector<Tensor>& tensors,
                 uint64_t reserved = kReserved, uint64_t alignment = 1) {
  prologue.tensor_count = tensors.size();
  prologue.metadata_nbytes = reserved;
  Bytes index, records;
  for (const Tensor& tensor : tensors) {
    prologue.tensor_size += tensor.header.data_nbytes;
    const uint64_t offset = kPrologueNbytes + reserved + records.size();
    const uint64_t bare_end = offset + record_header_nbytes(tensor.header);
    HeaderLayout layout =
        serialize_record_header(tensor.header, align_up(bare_end, alignment) - offset);
    digest::HeaderDigest digest = digest_header(layout, tensor.header.hashes);
    if (layout.crc32_at != 0)
      store_le(&layout.bytes[layout.crc32_at], digest::crc32(digest.crc32, tensor.payload));
    digest.sha256.update(tensor.payload);
    if (layout.sha256_at != 0) {
      std::ranges::copy(digest.sha256.finish(),
                        layout.bytes.begin() + static_cast<long>(layout.sha256_at));
    }
    if (layout.macs_at != 0) {
      std::ranges::copy(tensor.mac, layout.bytes.begin() + static_cast<long>(layout.macs_at));
    }
    const EntryToWrite entry{tensor.header.name,
                             tensor.header.dtype,
                             tensor.header.shape,
                             tensor.header.type,
                             offset,
                             offset + layout.bytes.size(),
                             tensor.header.data_nbytes};
    append_index_entry(index, entry, prologue.tagged_entries());
    records.insert(records.end(), layout.bytes.begin(), layout.bytes.end());
    const auto stored = tensor.stored_payload.empty() ? tensor.payload : tensor.stored_payload;
    records.insert(records.end(), stored.begin(), stored.end());
  }
  index.resize(reserved);
  const auto front = serialize_prologue(prologue);
  Bytes file(front.begin(), front.end());
  file.insert(file.end(), index.begin(), index.end());
  file.insert(file.end(), records.begin(), records.end());
  file.resize(file.size() + 8);
  return file;
}

const std::vector<uint64_t> kTwo = {2};
const Bytes kPayload = from_hex("0000803F 000020C0");  // 1.0, -2.5

Tensor w() {
  return {{0, TensorType::state_dict, "w", "<f4", kTwo, false, {}, false, {}, 8}, kPayload};
}

TEST(WorkedExample, APlainFileWithAnAlignedPayload) {
  const Bytes file = write_file({}, {w()}, /*reserved=*/4023, /*alignment=*/64);
  ASSERT_EQ(file.size(), 4240u);
  EXPECT_EQ(sha256_hex(file), "1dff45bb4a0b542f78e44335550153ed27e7534ba84c335cb5915208b7198a47");
}

TEST(WorkedExample, APlainFileWithoutPadding) {
  const Bytes file = write_file({}, {w()});
  ASSERT_EQ(file.size(), 262307u);
  EXPECT_EQ(to_hex(std::span(file).first(110)),
            to_hex(from_hex("7C545A527C 01000000"
                            "0000000000000000000000000000000000000000000000000000000000000000"
                            "0800000000000000 0000000000000000 0100000000000000 0000040000000000"
                            "0100 77 02 03 3C6634 01 02000000"
                            "4900040000000000 9300040000000000 0800000000000000")));
  EXPECT_EQ(to_hex(std::span(file).subspan(262217)),
            to_hex(from_hex("4A00000000000000 0000 02 0100 77 03 3C6634 01 02000000"
                            "2900 02 0004 4986481B"
                            "0120 9B2852C91E13B3710E047A698D537E69 25DB84316CF1A388E384BE49B943AE2C"
                            "0800000000000000 0000803F 000020C0 0000000000000000")));
  EXPECT_EQ(digest::crc32(0, file), 0x8326C638u);
  EXPECT_EQ(sha256_hex(file), "3f4ea29cd461a95d2768b6697e4c3ec5d991c8f19fe4847596a846fa685fe86a");
}

TEST(WorkedExample, TheDigestsOfItsHeaderAlone) {
  const Tensor tensor = w();
  const HeaderLayout layout =
      serialize_record_header(tensor.header, record_header_nbytes(tensor.header));
  digest::HeaderDigest digest = digest_header(layout, {});
  EXPECT_EQ(digest.crc32, 0xC74C3F99u);
  EXPECT_EQ(to_hex(digest.sha256.finish()),
            "5aa3501d5f355cbfba81dd8eca00a1bcc262e31ae6bf05abb22eabd654ffed0d");
}

TEST(WorkedExample, TheSameTensorEncrypted) {
  Nonce nonce;
  for (size_t i = 0; i < nonce.size(); ++i) nonce[i] = static_cast<std::byte>(0x40 + i);
  const Bytes crypt = serialize_crypt_info(std::nullopt, nonce, 1);
  const Bytes mac = from_hex("E160B2B554008E879D034852084FF9F2");
  const Bytes ciphertext = from_hex("4A17D5463A519BEA");
  Tensor tensor = w();
  tensor.header.hashes = {.crc32 = false, .sha256 = true};
  tensor.header.has_crypt_info = true, tensor.header.crypt_info = crypt;
  tensor.mac = mac, tensor.stored_payload = ciphertext;
  Prologue prologue;
  prologue.version = kVersionEncrypted;
  const Bytes file = write_file(prologue, {tensor});
  ASSERT_EQ(file.size(), 262377u);
  EXPECT_EQ(to_hex(std::span(file).subspan(262217, 144)),
            to_hex(from_hex("9000000000000000 0000020100 77033C66340102000000 2300 01 0120"
                            "4E5AFDE1DBB1778BB946A3A8F0F7ADBC0E66E07FB84BFC4A284252CECB1349AD"
                            "4400000000000000 0100 3A00000000000000 0200 0000200000000000"
                            "404142434445464748494A4B4C4D4E4F5051525354555657 0100000000000000"
                            "E160B2B554008E879D034852084FF9F2 0800000000000000")));
  EXPECT_EQ(sha256_hex(file), "e7a3e9eaa0f19df7cba68745d14dfe28bc21ad451caee4a14c35954f65ea49af");
}

TEST(WorkedExample, ATensorWithoutDataInAnEncryptedFile) {
  const Bytes crypt = serialize_empty_crypt_info();
  const std::vector<uint64_t> shape = {2, 3};
  const Tensor tensor{{0, TensorType::state_dict, "m", "<f4", shape, false, {}, true, crypt, 0},
                      {}};
  Prologue prologue;
  prologue.version = kVersionMeta, prologue.flags = kFlagEncrypted;
  const Bytes file = write_file(prologue, {tensor});
  const auto parsed = testing::read_file(file, KeyGiven::yes);
  const RecordHeader& header = parsed.headers[0];
  EXPECT_EQ((*parsed.index)[0].header_nbytes(), 88u);
  EXPECT_EQ(to_hex(header.hashes[0].value), "5f3d9058");
  EXPECT_EQ(to_hex(header.hashes[1].value),
            "e9149852d4496068ae297a17fbdf0b18037a27fd97e28879c70f6d9808776190");
  EXPECT_TRUE((*parsed.index)[0].zero_filled());
}

TEST(WorkedExample, AFileWithALongDimension) {
  const std::vector<uint64_t> shape = {uint64_t{1} << 32, 0};
  const Tensor z{{0, TensorType::state_dict, "z", "|i1", shape, true, {}, false, {}, 0}, {}};
  Prologue prologue;
  prologue.version = kVersionLong, prologue.flags = kFlagVersionedHeaders;
  const Bytes file = write_file(prologue, {w(), z});
  ASSERT_EQ(file.size(), 262393u);
  EXPECT_EQ(
      to_hex(std::span(file).subspan(73, 94)),
      to_hex(from_hex("01000000 010077 02 033C6634 01 02000000 4900040000000000 9300040000000000"
                      "0800000000000000 05000000 01007A 02 037C6931 02 0000000001000000"
                      "0000000000000000 9B00040000000000 F100040000000000 0000000000000000")));
  EXPECT_EQ(sha256_hex(file), "99adc9ec4fc86324db7a87501178971ad8aa68aaf092608b16523ab9dd4c3f7d");
}

}  // namespace
}  // namespace tensorizer::format
