// The layout of a file to be written: a pure function of what goes in. All sizes are known before
// the first byte. Source: docs/format.md, "What our writer chooses".
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "format/crypt_info.h"
#include "format/index.h"
#include "format/prologue.h"
#include "format/record_header.h"

namespace tensorizer::save {

// One tensor as the caller describes it.
struct TensorToWrite {
  std::string name;   // stored bytes (format::encode_name)
  std::string dtype;  // full stored dtype
  std::vector<uint64_t> shape;
  format::TensorType type = format::TensorType::state_dict;
  uint16_t module_idx = 0;
  uint64_t data_nbytes = 0;  // 0 for a meta tensor
  bool meta = false;
  bool opaque() const noexcept { return dtype.find('\0') != std::string::npos; }
};

// One record, placed.
struct PlannedRecord {
  uint64_t offset = 0;
  format::HeaderLayout header;
  uint64_t data_nbytes = 0;
  format::Nonce nonce{};  // encrypted records with data
  bool encrypted = false;
  uint64_t data_offset() const noexcept { return offset + header.bytes.size(); }
  uint64_t end() const noexcept { return data_offset() + data_nbytes; }
};

// What an index entry needs to be written again later.
struct SavedEntry {
  TensorToWrite tensor;  // dtype here is what the index shows
  uint64_t offset;
  uint64_t data_offset;
  digest::Sha256Digest
      header_digest;  // of the record header; only if the file gets a tag or a signature
  format::EntryToWrite view() const noexcept {
    return {tensor.name, tensor.dtype, tensor.shape,      tensor.type,
            offset,      data_offset,  tensor.data_nbytes};
  }
};

struct PlanChoice {
  digest::HashChoice hashes;
  bool encrypted = false;
  std::optional<format::KeyDerivation> derivation;  // how the key came from a passphrase
};

inline constexpr uint64_t kLargeTensorNbytes = uint64_t{256} << 10;
inline constexpr uint64_t kLargeAlignment = 4096;
inline constexpr uint64_t kSmallAlignment = 64;

// The lowest data version that can hold the tensors, given the one that holds those written before.
format::Prologue raise_version(format::Prologue prologue, const TensorToWrite& tensor,
                               bool encrypted);

// Places a record at `offset` (the end of the one before), its payload aligned by padding the
// header. `nonce` is that of the first cipher chunk. Throws Error(invalid_argument) for fields that
// do not fit the format.
PlannedRecord plan_record(const TensorToWrite& tensor, uint64_t offset, const PlanChoice& choice,
                          const format::Nonce& nonce);

// The dtype shown by the index: without its torch name where there is no data, so that older
// readers can size it.
std::string index_dtype(const TensorToWrite& tensor);

// Bytes to reserve for an index that needs `needed` now, so that the first record starts at a
// multiple of 4096 from the container's start. `growing`: more calls are expected.
uint64_t index_room(uint64_t needed, bool growing) noexcept;

}  // namespace tensorizer::save
