// What is kept of the record headers of a load: their fields and what their hashes need, without
// padding, MACs or nonces. Written by the workers of one load, each record once; immutable
// afterwards.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "format/record_header.h"
#include "load/open_index.h"

namespace tensorizer::load {

class LoadedHeaders {
 public:
  // `entries`: the entry number of each target.
  LoadedHeaders(std::shared_ptr<const OpenedIndex> opened, std::vector<uint32_t> entries);

  size_t size() const noexcept { return entries_.size(); }

  // Keeps the header of a target, parsed from `bytes`.
  void keep(size_t target, const format::RecordHeader& header, std::span<const std::byte> bytes);

  // Dtype and shape of a record, as its header says, or the index where the container has none.
  // Throws std::out_of_range.
  std::string_view dtype(size_t target) const;
  std::span<const uint64_t> shape(size_t target) const;

  // All fields of a kept header, or what the index says where the container has none; they borrow
  // from this object. Throws std::out_of_range.
  format::RecordHeader header(size_t target) const;

  // Whether `data` is what the record was written with: its header digests, continued with it. True
  // where none are stored.
  bool matches(size_t target, std::span<const std::byte> data) const;

 private:
  struct Kept {
    std::unique_ptr<std::byte[]> bytes;  // up to the hashes; then the padding, where it is not zero
    uint32_t front_nbytes = 0;
    uint32_t dtype_at = 0;
    uint8_t dtype_nbytes = 0;
    bool is_scalar = false;
    bool zero_padding = true;
    uint64_t padding_nbytes = 0;
  };
  const format::IndexEntry& entry_of(size_t target) const {
    return opened_->index[entries_[target]];
  }

  std::shared_ptr<const OpenedIndex> opened_;
  std::vector<uint32_t> entries_;
  std::vector<Kept> kept_;
};

}  // namespace tensorizer::load
