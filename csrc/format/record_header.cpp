#include "format/record_header.h"

#include <algorithm>

#include "core/byte_cursor.h"
#include "core/byte_writer.h"
#include "format/dtype.h"
#include "format/tensor_path.h"

namespace tensorizer::format {
namespace {

constexpr size_t kTrailerNbytes = 8;  // the data length ends the header, whatever stands before it
constexpr uint64_t kMaxPaddingNbytes = uint64_t{1} << 20;
constexpr uint64_t kMaxBlockNbytes =
    65535;                                // limit of u16 lengths: of a name, a hash block, a salt
constexpr uint64_t kMaxDerivations = 16;  // far more than the one that is legal

[[noreturn]] void fail_header(const IndexEntry& entry, const std::string& problem) {
  throw Error(Errc::malformed,
              "record header of tensor " + display_name(entry.name) + ": " + problem, {},
              entry.offset);
}

std::string show_shape(std::span<const uint64_t> shape) {
  constexpr size_t kShown = 16;
  std::string text = "(";
  for (size_t i = 0; i < std::min(shape.size(), kShown); ++i) {
    if (i > 0) text += ", ";
    text += std::to_string(shape[i]);
  }
  if (shape.size() > kShown) text += ", ...";
  return text + ")";
}

std::string show_hex(std::span<const std::byte> bytes) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (const std::byte byte : bytes.first(std::min<size_t>(bytes.size(), 32))) {
    text.push_back(kDigits[std::to_integer<uint8_t>(byte) >> 4]);
    text.push_back(kDigits[std::to_integer<uint8_t>(byte) & 0xF]);
  }
  return text.empty() ? "nothing" : text;
}

// From the module index to the hashes.
RecordHeader parse_fields(ByteCursor& cursor, const IndexEntry& entry) {
  RecordHeader header;
  header.module_idx = cursor.read_le<uint16_t>("module index");
  const auto type = cursor.read_le<uint8_t>("tensor type");
  if (type > 2)
    fail_header(entry, "tensor type " + std::to_string(type) + " is not known, 0, 1 and 2 are");
  header.type = static_cast<TensorType>(type);
  header.name = cursor.take_text(cursor.read_le<uint16_t>("name length"), "name");
  header.dtype = cursor.take_text(cursor.read_le<uint8_t>("dtype length"), "dtype");
  append_dims(cursor, entry.wide_dims(), header.shape);
  const auto nbytes = cursor.read_le<uint16_t>("hash block length");
  const uint64_t at = cursor.offset();
  header.hash_block = cursor.take(nbytes, "hash block");
  header.hashes = parse_hash_block(header.hash_block, at);
  header.crypt_begin = header.crypt_end = cursor.position();
  return header;
}

void check_naming(const RecordHeader& header, const IndexEntry& entry) {
  if (header.type == TensorType::state_dict || !is_structured_name(header.name)) return;
  const TensorPath path = decode_name(header.name);
  if (path.size() == 1 && std::holds_alternative<std::string>(path.front()))
    return;  // a plain name in other clothes
  fail_header(entry, "a structured name on a parameter or buffer");
}

bool same_path(std::string_view a, std::string_view b) {
  return a == b || decode_name(a) == decode_name(b);
}

void check_dtype(const RecordHeader& header, const IndexEntry& entry) {
  if (header.dtype == entry.dtype) return;
  const StoredDtype found = parse_dtype(header.dtype);
  const StoredDtype wanted = parse_dtype(entry.dtype, /*allow_bare_void=*/true);
  // The index may leave the torch name out where there is no data, format.md "Tensors without
  // data".
  const bool bare = wanted.opaque() && wanted.torch_name.empty() && entry.data_nbytes == 0;
  const bool agree =
      bare ? found.opaque() && found.itemsize == wanted.itemsize : same_dtype(found, wanted);
  if (!agree) {
    fail_header(entry, "dtype " + display_name(header.dtype) + ", the index says " +
                           display_name(entry.dtype));
  }
}

void check_shape(const RecordHeader& header, const IndexEntry& entry) {
  if (std::ranges::equal(header.shape, entry.shape)) return;
  const bool scalar_without_data = header.shape.empty() && entry.data_nbytes == 0 &&
                                   entry.shape.size() == 1 && entry.shape[0] == 1;
  if (!scalar_without_data) {
    fail_header(
        entry, "shape " + show_shape(header.shape) + ", the index says " + show_shape(entry.shape));
  }
}

digest::HeaderDigest digest_without_crypt(std::span<const std::byte> bytes, uint64_t crypt_begin,
                                          uint64_t crypt_end, digest::HashChoice hashes) {
  digest::HeaderDigest digest;
  for (const auto part : {bytes.first(crypt_begin), bytes.subspan(crypt_end)}) {
    if (hashes.crc32) digest.crc32 = digest::crc32(digest.crc32, part);
    if (hashes.sha256) digest.sha256.update(part);
  }
  return digest;
}

void check_hash(const RecordHeader& header, const StoredHash& hash, const char* kind,
                size_t wanted_nbytes, const void* computed) {
  const auto fail_hash = [&](const std::string& problem) {
    throw Error(Errc::hash_mismatch,
                "tensor " + display_name(header.name) + ": " + kind + " " + problem);
  };
  if (hash.value.size() != wanted_nbytes) {
    fail_hash("is stored in " + std::to_string(hash.value.size()) + " bytes, not " +
              std::to_string(wanted_nbytes));
  }
  if (computed == nullptr) fail_hash("is stored but was not computed");
  const std::span found(static_cast<const std::byte*>(computed), wanted_nbytes);
  if (!std::ranges::equal(found, hash.value)) {
    fail_hash("does not match: stored " + show_hex(hash.value) + ", computed " + show_hex(found));
  }
}

}  // namespace

uint64_t max_record_header_nbytes(const IndexEntry& entry, bool has_crypt_info) noexcept {
  constexpr uint64_t kFixedNbytes = 64;  // lengths, counts, type, module index, data length
  constexpr uint64_t kMaxDtypeNbytes = 255;
  uint64_t nbytes = kFixedNbytes + kMaxBlockNbytes + kMaxDtypeNbytes +
                    entry.shape.size() * sizeof(uint64_t) + kMaxBlockNbytes + kMaxPaddingNbytes;
  if (!has_crypt_info) return nbytes;
  nbytes += kMaxDerivations * (kFixedNbytes + kMaxBlockNbytes) + kFixedNbytes + kNonceNbytes;
  return nbytes + (entry.data_nbytes / kMinChunkNbytes + 1) * kMacNbytes;
}

std::vector<StoredHash> parse_hash_block(std::span<const std::byte> block, uint64_t origin) {
  ByteCursor cursor(block, "hash block", origin);
  const auto count = cursor.read_le<uint8_t>("hash count");
  std::vector<StoredHash> hashes;
  hashes.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    const auto type = cursor.read_le<uint8_t>("hash type");
    if (type > 1)
      cursor.fail("hash type", "hash type " + std::to_string(type) + " is not known, 0 and 1 are");
    const auto value = cursor.take(cursor.read_le<uint8_t>("hash length"), "hash value");
    hashes.push_back({static_cast<HashType>(type), value});
  }
  return hashes;  // readers ignore bytes behind the last hash
}

digest::HashChoice stored_kinds(const RecordHeader& header) noexcept {
  digest::HashChoice stored{.crc32 = false, .sha256 = false};
  for (const StoredHash& hash : header.hashes)
    (hash.type == HashType::crc32 ? stored.crc32 : stored.sha256) = true;
  return stored;
}

RecordHeader parse_record_header(std::span<const std::byte> bytes, const IndexEntry& entry,
                                 bool has_crypt_info) {
  if (bytes.size() < kTrailerNbytes)
    fail_header(entry, "only " + std::to_string(bytes.size()) + " bytes");
  const auto front = bytes.first(bytes.size() - kTrailerNbytes);
  ByteCursor cursor(front, "record header", entry.offset);
  const auto nbytes = cursor.read_le<uint64_t>("header size");
  if (nbytes != bytes.size()) {
    fail_header(entry, "a size of " + std::to_string(nbytes) + " bytes, the index leaves " +
                           std::to_string(bytes.size()));
  }
  RecordHeader header = parse_fields(cursor, entry);
  if (has_crypt_info) {
    const auto block_nbytes = cursor.read_le<uint64_t>("crypt_info length");
    const uint64_t at = cursor.offset();
    header.crypt = parse_crypt_info(cursor.take(block_nbytes, "crypt_info"), at);
    header.crypt_end = cursor.position();
  }
  const auto data_nbytes = load_le<int64_t>(bytes.last(kTrailerNbytes).data());
  if (data_nbytes < 0) fail_header(entry, "a negative data length, " + std::to_string(data_nbytes));
  header.data_nbytes = static_cast<uint64_t>(data_nbytes);
  if (header.name != entry.name)
    decode_name(header.name);  // the entry's was checked with the index
  check_naming(header, entry);
  if (header.dtype != entry.dtype || entry.data_nbytes == 0) parse_dtype(header.dtype);
  return header;
}

void check_against_index(const RecordHeader& header, const IndexEntry& entry) {
  if (!same_path(header.name, entry.name))
    fail_header(entry, "it is named " + display_name(header.name));
  check_dtype(header, entry);
  check_shape(header, entry);
  if (header.data_nbytes != entry.data_nbytes) {
    fail_header(entry, "a data length of " + std::to_string(header.data_nbytes) +
                           " bytes, the index says " + std::to_string(entry.data_nbytes));
  }
}

digest::HeaderDigest digest_header(std::span<const std::byte> bytes, const RecordHeader& header,
                                   digest::HashChoice hashes) {
  std::vector<std::byte> zeroed(bytes.begin(), bytes.end());
  for (const StoredHash& hash : header.hashes) {
    const auto at = hash.value.data() - bytes.data();
    std::fill_n(zeroed.begin() + at, hash.value.size(), std::byte{0});
  }
  return digest_without_crypt(zeroed, header.crypt_begin, header.crypt_end, hashes);
}

void check_hashes(const RecordHeader& header, const uint32_t* crc32,
                  const digest::Sha256Digest* sha256) {
  for (const StoredHash& hash : header.hashes) {
    if (hash.type == HashType::crc32) {
      check_hash(header, hash, "CRC32", 4, crc32);
    } else {
      check_hash(header, hash, "SHA-256", 32, sha256);
    }
  }
}

// --- writing ---

uint64_t record_header_nbytes(const HeaderToWrite& header) noexcept {
  const uint64_t hash_nbytes = (header.hashes.crc32 ? 6 : 0) + (header.hashes.sha256 ? 34 : 0);
  return 8 + 2 + 1 + 2 + header.name.size() + 1 + header.dtype.size() + 1 +
         (header.wide_dims ? 8 : 4) * header.shape.size() + 2 + 1 + hash_nbytes +
         (header.has_crypt_info ? header.crypt_info.size() : 0) + kTrailerNbytes;
}

namespace {

void check_writable(const HeaderToWrite& header, uint64_t padded_nbytes) {
  const auto refuse = [&](const std::string& problem, Errc code = Errc::out_of_range) {
    throw Error(code, "tensor " + display_name(header.name) + ": " + problem);
  };
  check_fields_fit(header.name, header.dtype, header.shape, header.wide_dims);
  if (header.data_nbytes > INT64_MAX) refuse("its data has 2^63 bytes or more");
  if (header.has_crypt_info && header.crypt_info.size() < 10)
    refuse("its crypt_info block is missing", Errc::invalid_argument);
  if (padded_nbytes < record_header_nbytes(header))
    refuse("its record header does not fit in the planned size", Errc::invalid_argument);
}

// The value is filled in later. Returns its offset.
uint64_t put_hash(std::vector<std::byte>& bytes, HashType type, uint8_t nbytes) {
  ByteWriter out(bytes);
  out.put(static_cast<uint8_t>(type));
  out.put(nbytes);
  out.put_zeros(nbytes);
  return bytes.size() - nbytes;
}

// Where the MACs begin in a block with its prefix, 0 if there are no MACs: they end what the writer
// serializes.
uint64_t first_mac(std::span<const std::byte> block) {
  const CryptInfo info = parse_crypt_info(block.subspan(8), 0);
  if (!info.cipher || info.cipher->macs.empty()) return 0;
  return static_cast<uint64_t>(info.cipher->macs.data() - block.data());
}

}  // namespace

HeaderLayout serialize_record_header(const HeaderToWrite& header, uint64_t padded_nbytes) {
  check_writable(header, padded_nbytes);
  HeaderLayout layout;
  layout.bytes.reserve(padded_nbytes);
  ByteWriter out(layout.bytes);
  out.put(padded_nbytes);
  out.put(header.module_idx);
  out.put(static_cast<uint8_t>(header.type));
  out.put(static_cast<uint16_t>(header.name.size()));
  out.put_text(header.name);
  out.put(static_cast<uint8_t>(header.dtype.size()));
  out.put_text(header.dtype);
  put_shape(out, header.shape, header.wide_dims);
  const auto [crc32, sha256] = header.hashes;
  out.put(static_cast<uint16_t>(1 + (crc32 ? 6 : 0) + (sha256 ? 34 : 0)));
  out.put(static_cast<uint8_t>(int{crc32} + int{sha256}));
  if (crc32) layout.crc32_at = put_hash(layout.bytes, HashType::crc32, 4);
  if (sha256) layout.sha256_at = put_hash(layout.bytes, HashType::sha256, 32);
  layout.crypt_begin = layout.bytes.size();
  if (header.has_crypt_info) {
    out.put_bytes(header.crypt_info);
    if (const uint64_t macs_from = first_mac(header.crypt_info); macs_from > 0)
      layout.macs_at = layout.crypt_begin + macs_from;
  }
  layout.crypt_end = layout.bytes.size();
  out.put_zeros(padded_nbytes - kTrailerNbytes - layout.bytes.size());
  out.put(static_cast<int64_t>(header.data_nbytes));
  return layout;
}

digest::HeaderDigest digest_header(const HeaderLayout& layout, digest::HashChoice hashes) {
  return digest_without_crypt(layout.bytes, layout.crypt_begin, layout.crypt_end, hashes);
}

}  // namespace tensorizer::format
