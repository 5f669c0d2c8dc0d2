#include "load/loaded_headers.h"

#include <algorithm>
#include <cstring>

#include "core/endian.h"
#include "core/error.h"

namespace tensorizer::load {
namespace {

constexpr size_t kTrailerNbytes = 8;  // the data length, at the end

bool all_zero(std::span<const std::byte> bytes) noexcept {
  return bytes.empty() || (bytes[0] == std::byte{0} &&
                           std::memcmp(bytes.data(), bytes.data() + 1, bytes.size() - 1) == 0);
}

}  // namespace

LoadedHeaders::LoadedHeaders(std::shared_ptr<const OpenedIndex> opened,
                             std::vector<uint32_t> entries)
    : opened_(std::move(opened)), entries_(std::move(entries)), kept_(entries_.size()) {}

void LoadedHeaders::keep(size_t target, const format::RecordHeader& header,
                         std::span<const std::byte> bytes) {
  const auto front = bytes.first(header.crypt_begin);
  const auto padding =
      bytes.subspan(header.crypt_end, bytes.size() - header.crypt_end - kTrailerNbytes);
  Kept kept;
  kept.zero_padding = all_zero(padding);
  kept.front_nbytes = static_cast<uint32_t>(front.size());
  const auto* const text = reinterpret_cast<const char*>(bytes.data());
  kept.dtype_at = static_cast<uint32_t>(header.dtype.data() - text);
  kept.dtype_nbytes = static_cast<uint8_t>(header.dtype.size());
  kept.is_scalar = header.shape.empty();
  kept.padding_nbytes = padding.size();
  const size_t stored = front.size() + (kept.zero_padding ? 0 : padding.size());
  kept.bytes.reset(new std::byte[stored]);
  std::ranges::copy(front, kept.bytes.get());
  if (!kept.zero_padding) std::ranges::copy(padding, kept.bytes.get() + front.size());
  kept_[target] = std::move(kept);
}

std::string_view LoadedHeaders::dtype(size_t target) const {
  const Kept& kept = kept_.at(target);
  if (!kept.bytes) return entry_of(target).dtype;
  return {reinterpret_cast<const char*>(kept.bytes.get()) + kept.dtype_at, kept.dtype_nbytes};
}

// The index says (1,) of a scalar without data.
std::span<const uint64_t> LoadedHeaders::shape(size_t target) const {
  if (kept_.at(target).is_scalar) return {};
  return entry_of(target).shape;
}

format::RecordHeader LoadedHeaders::header(size_t target) const {
  const Kept& kept = kept_.at(target);
  const format::IndexEntry& entry = entry_of(target);
  if (kept.bytes) return format::parse_header_front({kept.bytes.get(), kept.front_nbytes}, entry);
  format::RecordHeader header;
  header.type = entry.type;
  header.name = entry.name;
  header.dtype = entry.dtype;
  header.shape.assign(entry.shape.begin(), entry.shape.end());
  header.data_nbytes = entry.data_nbytes;
  return header;
}

bool LoadedHeaders::matches(size_t target, std::span<const std::byte> data) const {
  const Kept& kept = kept_.at(target);
  if (!kept.bytes) return true;  // nothing was stored that could differ
  const format::IndexEntry& entry = entry_of(target);
  std::vector<std::byte> bytes(kept.front_nbytes + kept.padding_nbytes + kTrailerNbytes);
  const size_t stored = kept.front_nbytes + (kept.zero_padding ? 0 : kept.padding_nbytes);
  std::copy_n(kept.bytes.get(), stored, bytes.begin());
  store_le(bytes.data() + bytes.size() - kTrailerNbytes, entry.data_nbytes);
  const format::RecordHeader header =
      format::parse_header_front(std::span(bytes).first(kept.front_nbytes), entry);
  try {
    format::check_data(header, bytes, data);
    return true;
  } catch (const Error& error) {
    if (error.code() != Errc::hash_mismatch) throw;
    return false;
  }
}

}  // namespace tensorizer::load
