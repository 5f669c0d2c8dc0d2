#include "load/record_facts.h"

#include <algorithm>
#include <atomic>

#include "core/error.h"
#include "core/run_workers.h"
#include "core/stop.h"
#include "core/threads.h"
#include "format/record_header.h"
#include "format/tensor_path.h"

namespace tensorizer::load {
namespace {

RecordFacts facts_of(std::span<const std::byte> bytes, const format::IndexEntry& entry,
                     bool encrypted) {
  const format::RecordHeader header = format::parse_record_header(bytes, entry, encrypted);
  format::check_against_index(header, entry);
  RecordFacts facts{.module_idx = header.module_idx, .digests = {}};
  for (const format::StoredHash& hash : header.hashes)
    facts.digests.push_back(
        StoredDigest{hash.type, std::vector<std::byte>(hash.value.begin(), hash.value.end())});
  return facts;
}

}  // namespace

std::vector<RecordFacts> read_record_facts(io::RangeSource& source, const OpenedIndex& opened,
                                           std::span<const uint32_t> entries,
                                           const std::stop_token& stop) {
  std::vector<RecordFacts> facts(entries.size());
  std::atomic<size_t> next{0};
  const unsigned wanted = std::max(source.traits().concurrency, cpu_quota());
  const auto workers = static_cast<unsigned>(std::clamp<size_t>(entries.size(), 1, wanted));
  run_workers(workers, stop, [&](const std::stop_token& token) {
    std::vector<std::byte> bytes;
    for (size_t i = next.fetch_add(1); i < entries.size(); i = next.fetch_add(1)) {
      throw_if_stopped(token);
      const format::IndexEntry& entry = opened.index[entries[i]];
      bytes.resize(entry.header_nbytes());
      try {
        source.read_at(entry.offset, io::Slice(bytes), token);
        facts[i] = facts_of(bytes, entry, opened.prologue.has_crypt_info());
      } catch (const Error& error) {
        if (error.code() == Errc::cancelled || error.code() == Errc::io) throw;
        throw Error(
            error.code(),
            source.name() + ": tensor " + format::display_name(entry.name) + ": " + error.what(),
            source.name(), entry.offset);
      }
    }
  });
  return facts;
}

}  // namespace tensorizer::load
