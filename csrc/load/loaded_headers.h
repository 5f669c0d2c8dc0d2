// The fields of the record headers of a load, and the digests that their hashes begin with. Written
// by the workers of one load, each record once; immutable afterwards.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "digest/digest.h"
#include "format/record_header.h"
#include "load/open_index.h"

namespace tensorizer::load {

class LoadedHeaders {
 public:
  // `entries`: the entry number of each target.
  LoadedHeaders(std::shared_ptr<const OpenedIndex> opened, std::vector<uint32_t> entries);

  size_t size() const noexcept { return entries_.size(); }

  // Keeps the fields of a target's header. `digest`: format::digest_header() of its bytes.
  void keep(size_t target, const format::RecordHeader& header, const digest::HeaderDigest& digest);

  // Dtype and shape of a record, from its header, or from the index if there are no headers. Throws
  // std::out_of_range.
  std::string_view dtype(size_t target) const;
  std::span<const uint64_t> shape(size_t target) const;

  // The fields of a kept header without its crypt_info, or those of the index if there are no
  // headers; they borrow from this object. Throws std::out_of_range.
  format::RecordHeader header(size_t target) const;

  // Whether the digests of `data` are the stored hashes. True if no hashes are stored. Throws
  // std::out_of_range.
  bool matches(size_t target, std::span<const std::byte> data) const;

 private:
  struct Kept {
    digest::HeaderDigest digest;
    std::unique_ptr<std::byte[]> hash_block;  // null: this header was not read
    std::unique_ptr<std::string> dtype;       // if it is not spelled as in the index
    uint16_t hash_block_nbytes = 0;
    uint16_t module_idx = 0;
    format::TensorType type = format::TensorType::state_dict;
    bool is_scalar = false;
  };
  const format::IndexEntry& entry_of(size_t target) const {
    return opened_->index[entries_[target]];
  }

  std::shared_ptr<const OpenedIndex> opened_;
  std::vector<uint32_t> entries_;
  std::vector<Kept> kept_;
};

}  // namespace tensorizer::load
