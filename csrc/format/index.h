// The metadata block: one entry per tensor. Parsed once to a table that is immutable afterwards and
// safe to share. Source: docs/format.md, "Index".
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/byte_cursor.h"
#include "core/byte_writer.h"
#include "format/prologue.h"

namespace tensorizer::format {

// Of a payload, and of a file: lengths are signed in record headers and in torch.
inline constexpr uint64_t kMaxNbytes = INT64_MAX;

enum class TensorType : uint8_t { parameter = 0, buffer = 1, state_dict = 2 };

// One entry. Texts and dimensions borrow from the Index that holds it.
struct IndexEntry {
  std::string_view name;   // stored bytes: plain, or 0x1E and a JSON array
  std::string_view dtype;  // stored dtype text; empty where no tensor can be made of it
  std::span<const uint64_t> shape;
  // The container's own name of the type, if it has one: "F32" in a safetensors file.
  std::string_view container_dtype;
  uint64_t offset = 0;       // of the record header, absolute in the source
  uint64_t data_offset = 0;  // of the payload
  uint64_t data_nbytes = 0;
  uint32_t entry_version = 1;  // 1 or 5: width of the dimensions in the record header
  TensorType type = TensorType::state_dict;
  uint32_t itemsize = 0;       // bytes per element, from dtype
  uint64_t loaded_nbytes = 0;  // bytes the tensor occupies once loaded: itemsize * product(shape)

  // 0 in containers without record headers.
  uint64_t header_nbytes() const noexcept { return data_offset - offset; }
  uint64_t end() const noexcept { return data_offset + data_nbytes; }
  // Written without data: comes back as zeros of its shape (format.md 5.5).
  bool zero_filled() const noexcept { return data_nbytes == 0 && loaded_nbytes > 0; }
  bool wide_dims() const noexcept { return entry_version >= 5; }
};

class Index {
 public:
  // Parses `prologue.tensor_count` entries from `block` (the metadata block, owned from now on),
  // which starts at `origin` in the source. `source_nbytes` bounds every extent (UINT64_MAX:
  // unknown). Checks, besides the fields: name and path rules, tensor type, dtype text, extents
  // inside the source, in file order and not overlapping, and payloads long enough for their shape
  // (format.md 5.4: surplus bytes are legal, except that a data length of 0 means zeros). Throws
  // Error: malformed, truncated (an extent beyond the source's end). An index without entries is
  // Error(malformed): no reader of the field accepts it.
  Index(const Prologue& prologue, std::vector<std::byte> block, uint64_t origin,
        uint64_t source_nbytes);

  // The index of another container, whose parser has checked it. Entries are in file order and
  // borrow from `block` and `dims`.
  Index(std::vector<std::byte> block, std::vector<uint64_t> dims, std::vector<IndexEntry> entries);

  // Movable only: entries borrow from the block.
  Index(Index&&) noexcept = default;
  Index& operator=(Index&&) noexcept = default;

  const std::vector<IndexEntry>& entries() const noexcept { return entries_; }
  const IndexEntry& operator[](size_t i) const noexcept { return entries_[i]; }
  size_t size() const noexcept { return entries_.size(); }
  // The bytes of the entries, and the bytes behind the last of them in the block.
  std::span<const std::byte> entry_bytes() const noexcept {
    return std::span(block_).first(entries_nbytes_);
  }
  std::span<const std::byte> slack() const noexcept {
    return std::span(block_).subspan(entries_nbytes_);
  }

 private:
  std::vector<std::byte> block_;
  size_t entries_nbytes_ = 0;
  std::vector<uint64_t> dims_;
  std::vector<IndexEntry> entries_;
};

// Writing. Bytes of one entry; `tagged` adds the entry version.
struct EntryToWrite {
  std::string_view name;
  std::string_view dtype;
  std::span<const uint64_t> shape;
  TensorType type;
  uint64_t offset;
  uint64_t data_offset;
  uint64_t data_nbytes;
};
bool is_long(std::span<const uint64_t> shape) noexcept;  // any dimension >= 2^32
uint64_t index_entry_nbytes(const EntryToWrite& entry, bool tagged) noexcept;

// Throws Error(out_of_range) naming the tensor, if a field does not fit in index entries and record
// headers.
void check_fields_fit(std::string_view name, std::string_view dtype,
                      std::span<const uint64_t> shape, bool wide_dims);

// The number of dimensions and the dimensions, as both have them; read ones go behind `dims`.
void append_dims(ByteCursor& cursor, bool wide, std::vector<uint64_t>& dims);
void put_shape(ByteWriter& out, std::span<const uint64_t> shape, bool wide_dims);

// Throws as check_fields_fit.
void append_index_entry(std::vector<std::byte>& out, const EntryToWrite& entry, bool tagged);

}  // namespace tensorizer::format
