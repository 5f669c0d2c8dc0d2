#include "load/changed_source.h"

#include <algorithm>
#include <array>
#include <vector>

#include "core/error.h"
#include "load/authenticity.h"

namespace tensorizer::load {
namespace {

class Recheck {
 public:
  Recheck(io::RangeSource& source, const OpenedIndex& opened, const std::stop_token& stop)
      : source_(source), opened_(opened), stop_(stop) {}

  // The prologue may count more entries, and the block may be used further than before.
  bool index_is_the_same() const {
    std::array<std::byte, format::kPrologueNbytes> head;
    source_.read_at(opened_.start, io::Slice(head), stop_);
    const auto key =
        opened_.prologue.has_crypt_info() ? format::KeyGiven::yes : format::KeyGiven::no;
    const format::Prologue now = format::parse_prologue(head, opened_.start, key);
    if (now.tagged_entries() != opened_.prologue.tagged_entries() ||
        now.metadata_nbytes != opened_.prologue.metadata_nbytes ||
        now.tensor_count < opened_.prologue.tensor_count)
      return false;
    const std::span<const std::byte> entries = opened_.index.entry_bytes();
    std::vector<std::byte> found(entries.size());
    source_.read_at(opened_.start + head.size(), io::Slice(found), stop_);
    return std::ranges::equal(entries, found);
  }

  // Whether the record has digests now, and those that it was loaded with.
  bool has_digests_of(const LoadTarget& target, const format::RecordHeader& loaded) const {
    const format::IndexEntry& entry = opened_.index[target.entry];
    const std::vector<std::byte> bytes = header_bytes(entry);
    const format::RecordHeader header = accept_record(opened_, target.entry, bytes);
    return !header.hashes.empty() &&
           std::ranges::equal(header.hashes, loaded.hashes, [](const auto& now, const auto& then) {
             return now.type == then.type && std::ranges::equal(now.value, then.value);
           });
  }

  // Whether the bytes at hand are those that the record has digests of; throws if they are not.
  bool matches(const LoadTarget& target) const {
    const format::IndexEntry& entry = opened_.index[target.entry];
    const std::vector<std::byte> bytes = header_bytes(entry);
    const format::RecordHeader header = accept_record(opened_, target.entry, bytes);
    if (header.hashes.empty()) return false;
    format::check_data(header, bytes, {target.destination.data, entry.data_nbytes});
    return true;
  }

 private:
  std::vector<std::byte> header_bytes(const format::IndexEntry& entry) const {
    std::vector<std::byte> bytes(entry.header_nbytes());
    source_.read_at(entry.offset, io::Slice(bytes), stop_);
    return bytes;
  }

  io::RangeSource& source_;
  const OpenedIndex& opened_;
  const std::stop_token& stop_;
};

bool is_harmless(const io::SourceChange& change, const LoadJob& job, const std::stop_token& stop) {
  if (change.kind == io::SourceChange::Kind::written || job.options.parts) return false;
  const Recheck again(job.source, *job.opened, stop);
  if (!again.index_is_the_same()) return false;
  for (size_t i = 0; i < job.targets.size(); ++i) {
    throw_if_stopped(stop);
    const LoadTarget& target = job.targets[i];
    const format::IndexEntry& entry = job.opened->index[target.entry];
    if (entry.data_nbytes == 0) continue;
    if (job.options.verify) {
      if (!again.has_digests_of(target, job.headers->header(i))) return false;
      continue;
    }
    if (entry.end() > change.nbytes) return false;  // of a mapping, not even there to be looked at
    const bool is_here = target.destination.data != nullptr && job.options.engine == nullptr;
    if (!is_here || !again.matches(target)) return false;
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
