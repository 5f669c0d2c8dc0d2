#include "load/changed_source.h"

#include <algorithm>
#include <array>
#include <vector>

#include "core/error.h"
#include "load/authenticity.h"

namespace tensorizer::load {
namespace {

// The prologue may count more entries, and the block may be used further than before.
bool index_is_the_same(io::RangeSource& source, const OpenedIndex& opened,
                       const std::stop_token& stop) {
  std::array<std::byte, format::kPrologueNbytes> head;
  source.read_at(opened.start, io::Slice(head), stop);
  const auto key = opened.prologue.has_crypt_info() ? format::KeyGiven::yes : format::KeyGiven::no;
  const format::Prologue now = format::parse_prologue(head, opened.start, key);
  if (now.tagged_entries() != opened.prologue.tagged_entries() ||
      now.metadata_nbytes != opened.prologue.metadata_nbytes ||
      now.tensor_count < opened.prologue.tensor_count)
    return false;
  const std::span<const std::byte> entries = opened.index.entry_bytes();
  std::vector<std::byte> found(entries.size());
  source.read_at(opened.start + head.size(), io::Slice(found), stop);
  return std::ranges::equal(entries, found);
}

bool is_harmless(const io::SourceChange& change, const LoadJob& job, const std::stop_token& stop) {
  if (change.kind == io::SourceChange::Kind::written || job.options.parts) return false;
  const OpenedIndex& opened = *job.opened;
  if (!index_is_the_same(job.source, opened, stop)) return false;
  for (size_t i = 0; i < job.targets.size(); ++i) {
    throw_if_stopped(stop);
    const LoadTarget& target = job.targets[i];
    const format::IndexEntry& entry = opened.index[target.entry];
    if (entry.data_nbytes == 0) continue;
    const bool is_here = target.destination.data != nullptr && job.options.engine == nullptr;
    // Behind its end a mapping is not even there to be looked at.
    if (!job.options.verify && (entry.end() > change.nbytes || !is_here)) return false;
    std::vector<std::byte> bytes(entry.header_nbytes());
    job.source.read_at(entry.offset, io::Slice(bytes), stop);
    const format::RecordHeader header = accept_record(opened, target.entry, bytes);
    if (header.hashes.empty()) return false;
    if (!job.options.verify) {
      format::check_data(header, bytes, {target.destination.data, entry.data_nbytes});
      continue;
    }
    const bool same = std::ranges::equal(
        header.hashes, job.headers->header(i).hashes, [](const auto& now, const auto& then) {
          return now.type == then.type && std::ranges::equal(now.value, then.value);
        });
    if (!same) return false;
  }
  return true;
}

[[noreturn]] void throw_changed(const io::RangeSource& source, const io::SourceChange& change) {
  const bool cut = change.kind == io::SourceChange::Kind::cut;
  throw Error(cut ? Errc::truncated : Errc::io,
              source.name() + " changed while it was being loaded: " + change.what +
                  "; what was read may be a mix of both contents: load it again",
              source.name());
}

}  // namespace

void check_unchanged(const LoadJob& job, const std::stop_token& stop) {
  const std::optional<io::SourceChange> change = job.source.change();
  if (!change) return;
  try {
    if (is_harmless(*change, job, stop)) return;
  } catch (const Error& error) {  // it cannot even be read again
    if (error.code() == Errc::cancelled) throw;
  }
  throw_changed(job.source, *change);
}

void blame_change(const io::RangeSource& source) {
  const std::optional<io::SourceChange> change = source.change();
  if (change && change->kind != io::SourceChange::Kind::grown) throw_changed(source, *change);
}

void drop_damaged_copy(io::RangeSource& source, const Error& error) {
  if (!source.drop_copy()) return;
  Error longer(error.code(), std::string(error.what()) + "; the cached copy was removed; try again",
               error.source, error.offset);
  longer.version = error.version;
  throw longer;
}

}  // namespace tensorizer::load
