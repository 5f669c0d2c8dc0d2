#include "format/index.h"

#include <algorithm>

#include "core/checked_math.h"
#include "format/dtype.h"
#include "format/tensor_path.h"

namespace tensorizer::format {
namespace {

constexpr uint64_t kMaxShortDim = UINT32_MAX;

// Name and dtype have at least one and two bytes.
constexpr uint64_t kMinEntryNbytes = 2 + 1 + 1 + 1 + 2 + 1 + 24;
// header size, module index, type, name length and one byte, dtype length and two bytes, rank,
// empty hash block, data length.
constexpr uint64_t kMinRecordHeaderNbytes = 8 + 2 + 1 + 3 + 3 + 1 + 3 + 8;

[[noreturn]] void fail(const IndexEntry& entry, const std::string& problem,
                       Errc code = Errc::malformed) {
  throw Error(code, "index: tensor " + display_name(entry.name) + ": " + problem, {}, entry.offset);
}

uint32_t read_entry_version(ByteCursor& cursor) {
  const auto version = cursor.read_le<uint32_t>("entry version");
  if (version == 1 || version == 5) return version;
  cursor.fail("entry version",
              "entry version " + std::to_string(version) + " is not known, 1 and 5 are");
}

// Bytes of a dense tensor. Its non-zero dimensions are limited even where another one is zero:
// nothing downstream can hold such a shape.
uint64_t dense_nbytes(const IndexEntry& entry, std::span<const uint64_t> shape) {
  uint64_t extent = entry.itemsize;
  bool empty = false;
  for (const uint64_t dim : shape) {
    empty = empty || dim == 0;
    const auto product = dim == 0 ? extent : checked_mul(extent, dim);
    if (!product || *product > kMaxNbytes)
      fail(entry, "its shape is too large: 2^63 bytes or more");
    extent = *product;
  }
  return empty ? 0 : extent;
}

void check_payload(const IndexEntry& entry) {
  if (entry.data_nbytes > kMaxNbytes)
    fail(entry, "data length " + std::to_string(entry.data_nbytes) + " is too large");
  if (entry.data_nbytes > 0 && entry.data_nbytes < entry.loaded_nbytes) {
    fail(entry, "its shape and dtype want " + std::to_string(entry.loaded_nbytes) +
                    " bytes, its data has " + std::to_string(entry.data_nbytes));
  }
}

// Where the record lies: behind `previous_end`, inside the source.
void check_extent(const IndexEntry& entry, uint64_t previous_end, uint64_t source_nbytes) {
  if (entry.offset < previous_end) {
    fail(entry, "its record at byte " + std::to_string(entry.offset) + " begins before byte " +
                    std::to_string(previous_end) + ", where what precedes it ends");
  }
  if (entry.data_offset < entry.offset ||
      entry.data_offset - entry.offset < kMinRecordHeaderNbytes) {
    fail(entry, "its data at byte " + std::to_string(entry.data_offset) +
                    " leaves no room for the record header at byte " +
                    std::to_string(entry.offset));
  }
  const auto end = checked_add(entry.data_offset, entry.data_nbytes);
  if (!end) fail(entry, "its extent ends beyond 2^64");
  if (*end > source_nbytes) {
    fail(entry,
         "its data ends at byte " + std::to_string(*end) + ", the source has " +
             std::to_string(source_nbytes),
         Errc::truncated);
  }
}

class EntryParser {
 public:
  EntryParser(const Prologue& prologue, std::span<const std::byte> block, uint64_t origin,
              uint64_t source_nbytes)
      : cursor_(block, "index", origin),
        tagged_(prologue.tagged_entries()),
        source_nbytes_(source_nbytes),
        previous_end_(origin + std::max<uint64_t>(block.size(), prologue.metadata_nbytes)) {}

  // Appends the dimensions to `dims`; the entry's shape is set by the caller, when `dims` moves no
  // more.
  IndexEntry parse(std::vector<uint64_t>& dims) {
    IndexEntry entry;
    if (tagged_) entry.entry_version = read_entry_version(cursor_);
    entry.name = cursor_.take_text(cursor_.read_le<uint16_t>("name length"), "name");
    const auto type = cursor_.read_le<uint8_t>("tensor type");
    if (type > 2)
      fail(entry, "tensor type " + std::to_string(type) + " is not known, 0, 1 and 2 are");
    entry.type = static_cast<TensorType>(type);
    entry.dtype = cursor_.take_text(cursor_.read_le<uint8_t>("dtype length"), "dtype");
    const size_t first_dim = dims.size();
    append_dims(cursor_, entry.wide_dims(), dims);
    entry.offset = cursor_.read_le<uint64_t>("offset");
    entry.data_offset = cursor_.read_le<uint64_t>("data offset");
    entry.data_nbytes = cursor_.read_le<uint64_t>("data length");
    try {
      entry.itemsize =
          parse_dtype(entry.dtype, /*allow_bare_void=*/entry.data_nbytes == 0).itemsize;
    } catch (const Error& error) {
      fail(entry, error.what());
    }
    entry.loaded_nbytes = dense_nbytes(entry, std::span(dims).subspan(first_dim));
    check_payload(entry);
    check_extent(entry, previous_end_, source_nbytes_);
    previous_end_ = entry.end();
    return entry;
  }

  // Bytes parsed so far.
  size_t position() const noexcept { return cursor_.position(); }

 private:
  ByteCursor cursor_;
  bool tagged_;
  uint64_t source_nbytes_;
  uint64_t previous_end_;
};

}  // namespace

void append_dims(ByteCursor& cursor, bool wide, std::vector<uint64_t>& dims) {
  const auto rank = cursor.read_le<uint8_t>("rank");
  const auto stored = cursor.take(uint64_t{rank} * (wide ? 8 : 4), "dimensions");
  for (size_t i = 0; i < rank; ++i) {
    dims.push_back(wide ? load_le<uint64_t>(&stored[i * 8]) : load_le<uint32_t>(&stored[i * 4]));
  }
}

Index::Index(const Prologue& prologue, std::vector<std::byte> block, uint64_t origin,
             uint64_t source_nbytes)
    : block_(std::move(block)) {
  const uint64_t count = prologue.tensor_count;
  if (count == 0 || block_.empty())
    throw Error(Errc::malformed, "the file has no tensors", {}, origin);
  if (!checked_add(origin, std::max<uint64_t>(block_.size(), prologue.metadata_nbytes)))
    throw Error(Errc::malformed, "index: ends beyond 2^64", {}, origin);
  // Before anything is sized by the count.
  const uint64_t min_nbytes = kMinEntryNbytes + (prologue.tagged_entries() ? 4 : 0);
  if (count > block_.size() / min_nbytes) {
    throw Error(Errc::malformed,
                "index: " + std::to_string(count) + " tensors do not fit in its " +
                    std::to_string(block_.size()) + " bytes",
                {}, origin);
  }
  EntryParser parser(prologue, block_, origin, source_nbytes);
  std::vector<size_t> first_dims;
  entries_.reserve(count);
  first_dims.reserve(count + 1);
  for (uint64_t i = 0; i < count; ++i) {
    first_dims.push_back(dims_.size());
    entries_.push_back(parser.parse(dims_));
  }
  first_dims.push_back(dims_.size());
  entries_nbytes_ = parser.position();
  std::vector<std::string_view> names;
  names.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    entries_[i].shape = std::span(dims_).subspan(first_dims[i], first_dims[i + 1] - first_dims[i]);
    names.push_back(entries_[i].name);
  }
  check_paths(names);
}

Index::Index(std::vector<std::byte> block, std::vector<uint64_t> dims,
             std::vector<IndexEntry> entries)
    : block_(std::move(block)), dims_(std::move(dims)), entries_(std::move(entries)) {}

bool is_long(std::span<const uint64_t> shape) noexcept {
  return std::ranges::any_of(shape, [](uint64_t dim) { return dim > kMaxShortDim; });
}

uint64_t index_entry_nbytes(const EntryToWrite& entry, bool tagged) noexcept {
  const uint64_t dim_nbytes = tagged && is_long(entry.shape) ? 8 : 4;
  return (tagged ? 4 : 0) + 29 + entry.name.size() + entry.dtype.size() +
         dim_nbytes * entry.shape.size();
}

void check_fields_fit(std::string_view name, std::string_view dtype,
                      std::span<const uint64_t> shape, bool wide_dims) {
  check_fits(name, kNameLength, name.size(), kMaxNameNbytes);
  check_fits(name, "the length of its dtype text in bytes", dtype.size(), UINT8_MAX);
  check_fits(name, "its number of dimensions", shape.size(), UINT8_MAX);
  if (wide_dims) return;
  for (const uint64_t dim : shape) check_fits(name, "a dimension", dim, kMaxShortDim);
}

void append_index_entry(std::vector<std::byte>& out, const EntryToWrite& entry, bool tagged) {
  const bool wide = tagged && is_long(entry.shape);
  check_fields_fit(entry.name, entry.dtype, entry.shape, wide);
  ByteWriter to(out);
  if (tagged) to.put(uint32_t{wide ? 5u : 1u});
  to.put(static_cast<uint16_t>(entry.name.size()));
  to.put_text(entry.name);
  to.put(static_cast<uint8_t>(entry.type));
  to.put(static_cast<uint8_t>(entry.dtype.size()));
  to.put_text(entry.dtype);
  put_shape(to, entry.shape, wide);
  to.put(entry.offset);
  to.put(entry.data_offset);
  to.put(entry.data_nbytes);
}

void put_shape(ByteWriter& out, std::span<const uint64_t> shape, bool wide_dims) {
  out.put(static_cast<uint8_t>(shape.size()));
  for (const uint64_t dim : shape) {
    if (wide_dims) {
      out.put(dim);
    } else {
      out.put(static_cast<uint32_t>(dim));
    }
  }
}

}  // namespace tensorizer::format
