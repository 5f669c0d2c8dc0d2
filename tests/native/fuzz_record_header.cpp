// Input: u8 bits (1: the file has crypt_info, 2: wide dimensions, 4: leave the size field as it
// is), then a record header. What parses must serialize back to a header of the same meaning.
#include <algorithm>

#include "core/error.h"
#include "format/record_header.h"
#include "fuzz_check.h"

using namespace tensorizer;
using namespace tensorizer::format;

namespace {

bool has_hash(const RecordHeader& header, HashType type) {
  return std::ranges::count(header.hashes, type, &StoredHash::type) > 0;
}

bool same_crypt(const std::optional<CryptInfo>& a, const std::optional<CryptInfo>& b) {
  if (a.has_value() != b.has_value()) return false;
  if (!a) return true;
  if (a->derivations != b->derivations || a->cipher.has_value() != b->cipher.has_value())
    return false;
  return !a->cipher || (a->cipher->nonce == b->cipher->nonce &&
                        a->cipher->chunk_nbytes == b->cipher->chunk_nbytes &&
                        std::ranges::equal(a->cipher->macs, b->cipher->macs));
}

void check_round_trip(std::span<const std::byte> bytes, const RecordHeader& header,
                      IndexEntry entry) {
  const digest::HashChoice hashes{has_hash(header, HashType::crc32),
                                  has_hash(header, HashType::sha256)};
  const HeaderToWrite to_write{
      header.module_idx,
      header.type,
      header.name,
      header.dtype,
      header.shape,
      entry.wide_dims(),
      hashes,
      header.crypt.has_value(),
      bytes.subspan(header.crypt_begin, header.crypt_end - header.crypt_begin),
      header.data_nbytes};
  const HeaderLayout layout = serialize_record_header(to_write, record_header_nbytes(to_write) + 3);
  entry.data_offset = entry.offset + layout.bytes.size();
  const RecordHeader again = parse_record_header(layout.bytes, entry, header.crypt.has_value());
  FUZZ_CHECK(again.module_idx == header.module_idx && again.type == header.type);
  FUZZ_CHECK(again.name == header.name && again.dtype == header.dtype &&
             again.shape == header.shape);
  FUZZ_CHECK(again.data_nbytes == header.data_nbytes);
  FUZZ_CHECK(same_crypt(again.crypt, header.crypt));
  FUZZ_CHECK(again.crypt_begin == layout.crypt_begin && again.crypt_end == layout.crypt_end);
  FUZZ_CHECK(digest_header(layout, hashes).crc32 ==
             digest_header(layout.bytes, again, {hashes.crc32, true}).crc32);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  auto input = tensorizer::testing::fuzz_bytes(data, size);
  const auto bits = tensorizer::testing::take_integer<uint8_t>(input);
  std::vector<std::byte> bytes(input.begin(), input.end());
  if ((bits & 4) == 0 && bytes.size() >= 8) store_le(bytes.data(), uint64_t{bytes.size()});
  constexpr uint64_t kDims[] = {2};
  IndexEntry entry;
  entry.name = "w", entry.dtype = "<f4", entry.shape = kDims;
  entry.offset = 1000, entry.data_offset = 1000 + bytes.size(), entry.data_nbytes = 8;
  entry.itemsize = 4, entry.loaded_nbytes = 8;
  entry.entry_version = (bits & 2) != 0 ? 5 : 1;
  try {
    const RecordHeader header = parse_record_header(bytes, entry, (bits & 1) != 0);
    FUZZ_CHECK(header.crypt.has_value() == ((bits & 1) != 0));
    FUZZ_CHECK(header.crypt_begin <= header.crypt_end && header.crypt_end <= bytes.size() - 8);
    digest::HeaderDigest digest = digest_header(bytes, header, {});
    check_round_trip(bytes, header, entry);
    FUZZ_CHECK(parse_hash_block(header.hash_block).size() == header.hashes.size());
    const digest::Sha256Digest sha = digest.sha256.finish();
    if (header.crypt) check_crypt_info(*header.crypt, header.data_nbytes);
    check_against_index(header, entry);
    check_hashes(header, &digest.crc32, &sha);
  } catch (const Error& error) {
    FUZZ_CHECK(error.code() == Errc::malformed || error.code() == Errc::crypto ||
               error.code() == Errc::hash_mismatch);
    FUZZ_CHECK(std::string_view(error.what()).size() < 1000);
  }
  return 0;
}
