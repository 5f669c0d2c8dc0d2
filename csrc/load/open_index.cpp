#include "load/open_index.h"

#include <algorithm>
#include <limits>
#include <span>
#include <vector>

#include "core/error.h"

namespace tensorizer::load {
namespace {

// Bytes that are read of an index, at most, whatever the prologue claims: what entries and annex of
// ten million tensors take. The rest can only be slack. Of a source of unknown size, whose length
// nothing confirms, fewer are read.
constexpr uint64_t kMaxIndexNbytes = uint64_t{1} << 30;
constexpr uint64_t kMaxUnsizedIndexNbytes = uint64_t{64} << 20;
constexpr uint64_t kLongestFirstRead = uint64_t{1} << 20;

// Bytes to ask for first: all that decides, and where requests cost much, most indexes too.
uint64_t first_read_nbytes(const io::SourceTraits& traits, bool sized) noexcept {
  // Bytes of a stream cannot be read again, and the stream may end behind them.
  if (traits.sequential || !sized) return format::kContainerHeadNbytes;
  if (traits.gap_nbytes <= io::kCheapRequestNbytes) return format::kPrologueNbytes;
  return std::min(traits.gap_nbytes, kLongestFirstRead);
}

// Reads until the head has `nbytes`, or all there are.
void read_on(io::RangeSource& source, ContainerHead& head, uint64_t nbytes, uint64_t source_nbytes,
             const std::stop_token& stop) {
  const uint64_t available = source_nbytes - std::min(head.start, source_nbytes);
  const uint64_t wanted = std::min(nbytes, available);
  const uint64_t have = head.bytes.size();
  if (wanted <= have) return;
  head.bytes.resize(wanted);
  source.read_at(head.start + have, io::Buffer(head.bytes).subspan(have), stop);
}

std::vector<std::byte> read_block(io::RangeSource& source, const ContainerHead& head,
                                  uint64_t source_nbytes, bool sized, const std::stop_token& stop) {
  const uint64_t offset = head.index_at(), nbytes = head.index_nbytes();
  if (sized && nbytes > source_nbytes - std::min(offset, source_nbytes))
    throw Error(Errc::truncated, "the index wants " + std::to_string(nbytes) + " bytes at byte " +
                                     std::to_string(offset) + ", the file ends at byte " +
                                     std::to_string(source_nbytes));
  const std::span<const std::byte> known =
      std::span(head.bytes).subspan(std::min<uint64_t>(offset - head.start, head.bytes.size()));
  const uint64_t wanted = std::min(nbytes, sized ? kMaxIndexNbytes : kMaxUnsizedIndexNbytes);
  const auto begin = known.first(std::min<uint64_t>(known.size(), wanted));
  std::vector<std::byte> block(begin.begin(), begin.end());
  block.resize(wanted);
  if (begin.size() < wanted)
    source.read_at(offset + begin.size(), io::Buffer(block).subspan(begin.size()), stop);
  return block;
}

void take_ties(OpenedIndex& opened, std::vector<format::Tie> ties) {
  opened.ties = std::move(ties);
  for (uint32_t i = 0; i < opened.ties.size(); ++i) {
    if (!opened.ties[i].listed) opened.unlisted.push_back(i);
  }
}

std::shared_ptr<OpenedIndex> open_tensors(const ContainerHead& head, std::vector<std::byte> block,
                                          uint64_t source_nbytes) {
  auto opened = std::make_shared<OpenedIndex>(
      head, format::Index(head.prologue, std::move(block), head.index_at(), source_nbytes));
  const format::Index& index = opened->index;
  opened->annex = format::parse_annex(
      index.slack(), head.index_at() + index.entry_bytes().size(), index.size(),
      [&] { return format::digest_index(opened->prologue_bytes, index.entry_bytes()); });
  if (opened->annex) {
    opened->metadata = opened->annex->metadata;
    take_ties(*opened, format::resolve_ties(index, opened->annex->ties));
  }
  return opened;
}

std::shared_ptr<OpenedIndex> open_safetensors(const ContainerHead& head,
                                              std::vector<std::byte> block,
                                              uint64_t source_nbytes) {
  format::SafetensorsHeader header =
      format::parse_safetensors(std::move(block), head.start, source_nbytes);
  auto opened = std::make_shared<OpenedIndex>(head, std::move(header.index));
  opened->metadata = std::move(header.metadata);
  take_ties(*opened, format::ties_in_metadata(opened->index, opened->metadata));
  opened->prologue.tensor_count = opened->index.size();
  for (const format::IndexEntry& entry : opened->index.entries())
    opened->prologue.tensor_size += entry.data_nbytes;
  return opened;
}

// In a handler: an error of parsing, with the source's name. Errors of sources name it already, or
// is Python's, and goes on as it is.
[[noreturn]] void rethrow_with_source(const Error& error, io::RangeSource& source) {
  const std::string& name = source.name();
  const bool complete = !error.source.empty() || error.code() == Errc::io;
  if (complete || error.code() == Errc::cancelled) throw;
  Error named(error.code(), name + ": " + error.what(), name, error.offset);
  named.system_errno = error.system_errno;
  named.version = error.version;
  if (error.code() == Errc::malformed) drop_damaged_copy(source, named);
  throw named;
}

uint64_t size_or_unlimited(const io::RangeSource& source) {
  return source.size().value_or(std::numeric_limits<uint64_t>::max());
}

}  // namespace

uint32_t OpenedIndex::target(size_t i) const noexcept {
  if (i >= index.size()) return ties[unlisted[i - index.size()]].target;
  for (const format::Tie& tie : ties) {
    if (tie.listed == static_cast<uint32_t>(i)) return tie.target;
  }
  return static_cast<uint32_t>(i);
}

ContainerHead open_head(io::RangeSource& source, uint64_t start, format::KeyGiven key,
                        const std::stop_token& stop) {
  try {
    const uint64_t source_nbytes = size_or_unlimited(source);
    ContainerHead head;
    head.start = start;
    const bool sized = source.size().has_value();
    read_on(source, head, first_read_nbytes(source.traits(), sized), source_nbytes, stop);
    head.container = format::detect_container(head.bytes, start);
    if (head.container == format::Container::tensors) {
      read_on(source, head, format::kPrologueNbytes, source_nbytes, stop);
      const size_t nbytes = std::min<size_t>(head.bytes.size(), format::kPrologueNbytes);
      head.prologue = format::parse_prologue(std::span(head.bytes).first(nbytes), start, key);
      return head;
    }
    if (key == format::KeyGiven::yes)
      throw Error(Errc::crypto, "decryption was asked for, but safetensors files are not encrypted",
                  {}, start);
    head.prologue.version = 0;
    head.prologue.metadata_nbytes = *format::safetensors_header_nbytes(head.bytes);
    format::check_safetensors_length(head.prologue.metadata_nbytes, start, source_nbytes);
    return head;
  } catch (const Error& error) {
    rethrow_with_source(error, source);
  }
}

std::shared_ptr<OpenedIndex> open_index(io::RangeSource& source, const ContainerHead& head,
                                        const std::stop_token& stop) {
  try {
    const uint64_t source_nbytes = size_or_unlimited(source);
    std::vector<std::byte> block =
        read_block(source, head, source_nbytes, source.size().has_value(), stop);
    if (head.container == format::Container::tensors)
      return open_tensors(head, std::move(block), source_nbytes);
    return open_safetensors(head, std::move(block), source_nbytes);
  } catch (const Error& error) {
    rethrow_with_source(error, source);
  }
}

}  // namespace tensorizer::load
