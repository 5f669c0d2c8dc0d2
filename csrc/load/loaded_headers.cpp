#include "load/loaded_headers.h"

#include <algorithm>

#include "core/error.h"

namespace tensorizer::load {

LoadedHeaders::LoadedHeaders(std::shared_ptr<const OpenedIndex> opened,
                             std::vector<uint32_t> entries)
    : opened_(std::move(opened)), entries_(std::move(entries)), kept_(entries_.size()) {}

void LoadedHeaders::keep(size_t target, const format::RecordHeader& header,
                         const digest::HeaderDigest& digest) {
  Kept& kept = kept_[target];
  kept.digest = digest;
  const std::span<const std::byte> block = header.hash_block;
  kept.hash_block.reset(new std::byte[block.size()]);
  std::ranges::copy(block, kept.hash_block.get());
  kept.hash_block_nbytes = static_cast<uint16_t>(block.size());
  if (header.dtype != entry_of(target).dtype)
    kept.dtype = std::make_unique<std::string>(header.dtype);
  kept.module_idx = header.module_idx;
  kept.type = header.type;
  kept.is_scalar = header.shape.empty();
}

std::string_view LoadedHeaders::dtype(size_t target) const {
  const Kept& kept = kept_.at(target);
  return kept.dtype ? std::string_view(*kept.dtype) : entry_of(target).dtype;
}

// The index says (1,) of a scalar without data.
std::span<const uint64_t> LoadedHeaders::shape(size_t target) const {
  if (kept_.at(target).is_scalar) return {};
  return entry_of(target).shape;
}

format::RecordHeader LoadedHeaders::header(size_t target) const {
  const Kept& kept = kept_.at(target);
  const format::IndexEntry& entry = entry_of(target);
  format::RecordHeader header;
  header.type = entry.type;
  header.name = entry.name;
  header.dtype = dtype(target);
  const auto dims = shape(target);
  header.shape.assign(dims.begin(), dims.end());
  header.data_nbytes = entry.data_nbytes;
  if (kept.hash_block) {
    header.module_idx = kept.module_idx;
    header.type = kept.type;
    header.hash_block = {kept.hash_block.get(), kept.hash_block_nbytes};
    header.hashes = format::parse_hash_block(header.hash_block);
  }
  return header;
}

bool LoadedHeaders::matches(size_t target, std::span<const std::byte> data) const {
  const format::RecordHeader stored = header(target);
  const digest::HashChoice wanted = format::stored_kinds(stored);
  digest::HeaderDigest digest = kept_[target].digest;
  digest::Sha256Digest sha256{};
  if (wanted.crc32) digest.crc32 = digest::crc32(digest.crc32, data);
  if (wanted.sha256) {
    digest.sha256.update(data);
    sha256 = digest.sha256.finish();
  }
  try {
    format::check_hashes(stored, &digest.crc32, &sha256);
    return true;
  } catch (const Error& error) {
    if (error.code() != Errc::hash_mismatch) throw;
    return false;
  }
}

}  // namespace tensorizer::load
