#include "load/open_index.h"

#include <algorithm>
#include <array>
#include <limits>
#include <vector>

#include "core/error.h"
#include "format/foreign.h"

namespace tensorizer::load {
namespace {

// An index that claims to be larger than this is read only if the source is known to be that long.
constexpr uint64_t kUnsizedIndexLimit = uint64_t{64} << 20;

std::vector<std::byte> read_block(io::RangeSource& source, uint64_t offset, uint64_t nbytes,
                                  uint64_t source_nbytes, bool sized, const std::stop_token& stop) {
  if (sized && nbytes > source_nbytes - std::min(offset, source_nbytes))
    throw Error(Errc::truncated, "the index wants " + std::to_string(nbytes) + " bytes at byte " +
                                     std::to_string(offset) + ", the file ends at byte " +
                                     std::to_string(source_nbytes));
  if (!sized && nbytes > kUnsizedIndexLimit)
    throw Error(Errc::malformed, "the index claims " + std::to_string(nbytes) +
                                     " bytes in a source of unknown size");
  std::vector<std::byte> block(nbytes);
  if (nbytes > 0) source.read_at(offset, io::Slice(block), stop);
  return block;
}

// In a handler: what parsing found, with the source's name. What sources throw says it already, or
// is Python's, and goes on as it is.
[[noreturn]] void rethrow_with_source(const Error& error, const std::string& name) {
  const bool complete = !error.source.empty() || error.code() == Errc::io;
  if (complete || error.code() == Errc::cancelled) throw;
  Error named(error.code(), name + ": " + error.what(), name, error.offset);
  named.system_errno = error.system_errno;
  named.version = error.version;
  throw named;
}

// Throws what the pointer says, for which more of it has to be read than of a tensors file.
void describe_pointer(io::RangeSource& source, uint64_t start, const std::stop_token& stop) {
  std::array<std::byte, format::kForeignHeadNbytes> head;
  const auto bytes = std::span(head).first(std::min<uint64_t>(head.size(), *source.size() - start));
  source.read_at(start, io::Slice(bytes.data(), bytes.size()), stop);
  format::parse_prologue(bytes, start, format::KeyGiven::no);
}

uint64_t size_or_unlimited(const io::RangeSource& source) {
  return source.size().value_or(std::numeric_limits<uint64_t>::max());
}

}  // namespace

format::Prologue open_prologue(io::RangeSource& source, uint64_t start, format::KeyGiven key,
                               const std::stop_token& stop) {
  try {
    const uint64_t source_nbytes = size_or_unlimited(source);
    std::array<std::byte, format::kPrologueNbytes> head;
    const uint64_t available = source_nbytes - std::min(start, source_nbytes);
    const uint64_t head_nbytes = std::min<uint64_t>(head.size(), available);
    if (head_nbytes > 0) source.read_at(start, io::Slice(head.data(), head_nbytes), stop);
    const auto bytes = std::span(head).first(head_nbytes);
    if (source.size() && format::begins_lfs_pointer(bytes)) describe_pointer(source, start, stop);
    return format::parse_prologue(bytes, start, key);
  } catch (const Error& error) {
    rethrow_with_source(error, source.name());
  }
}

std::shared_ptr<const OpenedIndex> open_index(io::RangeSource& source, uint64_t start,
                                              const format::Prologue& prologue,
                                              const std::stop_token& stop) {
  try {
    const uint64_t source_nbytes = size_or_unlimited(source);
    const uint64_t block_at = start + format::kPrologueNbytes;
    std::vector<std::byte> block = read_block(source, block_at, prologue.metadata_nbytes,
                                              source_nbytes, source.size().has_value(), stop);
    return std::make_shared<const OpenedIndex>(
        start, prologue, format::Index(prologue, std::move(block), block_at, source_nbytes));
  } catch (const Error& error) {
    rethrow_with_source(error, source.name());
  }
}

}  // namespace tensorizer::load
