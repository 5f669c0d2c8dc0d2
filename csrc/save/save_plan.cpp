#include "save/save_plan.h"

#include <algorithm>

#include "core/checked_math.h"
#include "core/error.h"

namespace tensorizer::save {
namespace {

constexpr uint64_t kFirstIndexRoom = uint64_t{64} << 10;

}  // namespace

format::Prologue raise_version(format::Prologue prologue, const TensorToWrite& tensor,
                               bool encrypted) {
  uint32_t version = encrypted ? format::kVersionEncrypted : format::kVersionPlain;
  if (tensor.opaque()) version = std::max(version, format::kVersionOpaque);
  if (tensor.meta) version = std::max(version, format::kVersionMeta);
  if (format::is_long(tensor.shape)) version = std::max(version, format::kVersionLong);
  prologue.version = std::max(prologue.version, version);
  prologue.flags = 0;
  if (prologue.version >= format::kVersionMeta && encrypted)
    prologue.flags |= format::kFlagEncrypted;
  if (prologue.version >= format::kVersionLong) prologue.flags |= format::kFlagVersionedHeaders;
  return prologue;
}

PlannedRecord plan_record(const TensorToWrite& tensor, uint64_t offset, const PlanChoice& choice,
                          const format::Nonce& nonce) {
  PlannedRecord record;
  record.nonce = nonce;
  record.offset = offset;
  record.data_nbytes = tensor.data_nbytes;
  record.encrypted = choice.encrypted && tensor.data_nbytes > 0;
  std::vector<std::byte> crypt_info;
  if (record.encrypted) {
    crypt_info = format::serialize_crypt_info(choice.derivation, nonce,
                                              ceil_div(tensor.data_nbytes, kCipherChunkNbytes));
  } else if (choice.encrypted) {
    crypt_info = format::serialize_empty_crypt_info();
  }
  const format::HeaderToWrite header{.module_idx = tensor.module_idx,
                                     .type = tensor.type,
                                     .name = tensor.name,
                                     .dtype = tensor.dtype,
                                     .shape = tensor.shape,
                                     .wide_dims = format::is_long(tensor.shape),
                                     .hashes = choice.hashes,
                                     .has_crypt_info = choice.encrypted,
                                     .crypt_info = crypt_info,
                                     .data_nbytes = tensor.data_nbytes};
  const uint64_t bare = format::record_header_nbytes(header);
  const uint64_t alignment =
      tensor.data_nbytes >= kLargeTensorNbytes ? kLargeAlignment : kSmallAlignment;
  const uint64_t padded =
      tensor.data_nbytes > 0 ? align_up(offset + bare, alignment) - offset : bare;
  record.header = format::serialize_record_header(header, padded);
  return record;
}

std::string index_dtype(const TensorToWrite& tensor) {
  if (tensor.data_nbytes > 0) return tensor.dtype;
  return tensor.dtype.substr(0, tensor.dtype.find('\0'));
}

uint64_t index_room(uint64_t needed, bool growing) noexcept {
  const uint64_t wanted = growing ? std::max(needed * 4, kFirstIndexRoom) : needed + needed / 8;
  return align_up(format::kPrologueNbytes + wanted, kLargeAlignment) - format::kPrologueNbytes;
}

}  // namespace tensorizer::save
