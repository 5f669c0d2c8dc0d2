#include "load/session_plan.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "core/checked_math.h"
#include "core/error.h"
#include "core/format_sizes.h"
#include "core/threads.h"
#include "digest/deal.h"
#include "format/safetensors.h"
#include "load/accept_record.h"
#include "load/slice_plan.h"

namespace tensorizer::load {
namespace {

constexpr uint64_t kUnsizedHeaderLimit = uint64_t{256} << 20;
constexpr uint64_t kUnsizedDataLimit = uint64_t{4} << 40;  // the plan of more would take memory
// Of parts: a read of a cached file costs as much as copying so many bytes; the source says what a
// request to another machine costs.
constexpr uint64_t kCachedRunGapNbytes = 256;
constexpr uint64_t kCachedPartGapNbytes = 4096;
// Between two values of a store there may be a hole, so its source reads no gaps; within a tensor
// there are no holes.
constexpr uint64_t kLeastRunGapNbytes = 4096;
// Of units for a device that come from a source that waits: for each worker, where they are hashed
// from there.
constexpr uint64_t kReadBuffers = 3;
// Where many streams are hashed side by side, units are so much shorter: there are enough steps to
// fill the lanes of SHA-256 while they are in the cache, and in the three buffers of a worker.
constexpr uint64_t kShorterToHash = 8;
constexpr size_t kBriefUnits = 512;

// A container without record headers has no digests to compare: its index says all there is to
// know. Nor has a part. Data of a signed file in clear are always compared.
bool compares(const LoadOptions& options, const OpenedIndex& opened,
              const std::vector<LoadTarget>& targets) {
  if (options.parts) return false;
  const bool data = std::ranges::any_of(
      targets, [](const LoadTarget& t) { return !t.in_place || t.destination.data != nullptr; });
  return (options.verify && opened.has_record_headers()) ||
         (data && opened.binds_data_by_digests());
}

// What the index claims, before it sizes anything. Records do not overlap: the sums are below 2^64.
void check_records(const LoadSession& session) {
  uint64_t header_nbytes = 0, data_nbytes = 0;
  for (uint32_t record = 0; record < session.entries.size(); ++record) {
    const format::IndexEntry& entry = session.entry_of(record);
    session.naming(record, [&] {
      const bool no_elements = session.options.parts && entry.itemsize == 0;
      if (no_elements || (!session.reads_headers() && entry.dtype.empty()))
        throw Error(Errc::malformed, format::why_not_loadable(entry));
      if (session.reads_headers()) check_header_nbytes(entry, session.has_crypt_info());
    });
    if (session.options.parts) continue;  // the caller has memory for them
    header_nbytes += entry.header_nbytes();
    data_nbytes += entry.data_nbytes;
  }
  if (session.source.size()) return;
  const auto refuse = [&](const char* what, uint64_t nbytes) {
    throw Error(Errc::malformed, session.source.name() + ": " + what + " claim " +
                                     std::to_string(nbytes) + " bytes in a source of unknown size");
  };
  if (data_nbytes > kUnsizedDataLimit) refuse("tensors", data_nbytes);
  if (header_nbytes > kUnsizedHeaderLimit) refuse("record headers", header_nbytes);
}

uint64_t unit_nbytes(const LoadSession& session) {
  const io::SourceTraits traits = session.source.traits();
  const device::CopyEngine* const engine = session.options.engine;
  // A unit for a device fills a buffer, whose chunks are opened a few at a time.
  const bool in_cache = engine == nullptr || session.options.parts;
  if (in_cache && session.has_crypt_info() && traits.gap_nbytes <= io::kCheapRequestNbytes)
    return kCipherChunkNbytes;
  uint64_t unit = traits.unit_nbytes;
  if (traits.remote && session.options.request_nbytes > 0)
    unit = std::min(unit, session.options.request_nbytes);
  return engine ? std::min(unit, engine->buffer_nbytes()) : unit;
}

LoadPlan plan_whole(LoadSession& session) {
  const io::SourceTraits traits = session.source.traits();
  const LoadOptions& options = session.options;
  const bool all_in_place = std::ranges::all_of(session.targets, &LoadTarget::in_place);
  if (all_in_place && !session.targets.empty() && !options.verify) {
    for (const LoadTarget& target : session.targets)
      session.nbytes_done += target.destination.nbytes;
    return plan_headers(session.opened->index, session.entries, traits);
  }

  const unsigned workers = useful_workers(session);
  const size_t lanes = digest::Sha256::lanes();
  // Hashing takes longer than reading: as many chains as there are lanes, and soon.
  bool fills_lanes = options.verify && traits.in_memory && !traits.ascending;
  PlanOptions plan;
  plan.unit_nbytes = unit_nbytes(session);
  plan.gap_nbytes = traits.gap_nbytes;
  if (session.has_crypt_info()) plan.cut_nbytes = kCipherChunkNbytes;
  if (options.engine != nullptr) {
    plan.buffer_nbytes = options.engine->buffer_nbytes();
    fills_lanes = fills_lanes && workers > 1 && lanes >= digest::kManyLanes;
    // Bytes leave their buffer once they are hashed: several chains must be under way.
    if (options.verify && workers > 1 && !traits.sequential && !traits.ascending)
      plan.large_at_once = digest::kDealtPerWorker * workers;
  }
  if (fills_lanes) {
    if (options.engine == nullptr) {
      plan.spread = true;
    } else {
      if (plan.large_at_once > 0) plan.large_at_first = plan.large_at_once;
      plan.large_at_once = lanes * workers;
    }
    // Each begins in a buffer where it does in its page of the file, which takes a little room.
    if (lanes >= digest::kManyLanes) {
      const uint64_t shorter = align_down(plan.unit_nbytes / kShorterToHash - 1, plan.cut_nbytes);
      plan.unit_nbytes = std::min(plan.unit_nbytes, std::max(shorter, plan.cut_nbytes));
    }
    plan.whole_nbytes = plan.unit_nbytes / 8;  // larger payloads are hashed beside others
  }
  if (!plan.spread && plan.large_at_once == 0) plan.streams = std::min(traits.streams, workers);
  LoadPlan made = plan_load(session.opened->index, session.entries, plan);
  made.units_share_buffers = fills_lanes && options.engine != nullptr;
  return made;
}

LoadPlan plan_parts(const LoadSession& session) {
  const io::SourceTraits traits = session.source.traits();
  SlicePlanOptions plan;
  plan.unit_nbytes = unit_nbytes(session);
  const std::optional<uint64_t>& wanted = session.options.gap_nbytes;
  if (traits.in_memory) {
    plan.run_gap_nbytes = wanted.value_or(kCachedRunGapNbytes);
    plan.part_gap_nbytes = wanted.value_or(kCachedPartGapNbytes);
  } else {
    plan.run_gap_nbytes = wanted.value_or(std::max(traits.gap_nbytes, kLeastRunGapNbytes));
    plan.part_gap_nbytes = wanted.value_or(traits.gap_nbytes);
    plan.runs_at_once = 1;
  }
  std::vector<SlicePart> parts;
  parts.reserve(session.targets.size());
  for (uint32_t target = 0; target < session.targets.size(); ++target) {
    const uint32_t record = session.record_of(target);
    const format::IndexEntry& entry = session.entry_of(record);
    parts.push_back({.record = record,
                     .payload = entry.data_offset,
                     .payload_nbytes = entry.data_nbytes,
                     .chunk_nbytes = session.cipher ? session.cipher->chunk_nbytes(record) : 0});
    if (entry.data_nbytes > 0) parts.back().runs = session.targets[target].runs;  // else: zeros
  }
  return plan_slices(parts, plan);
}

// Of whole tensors: parts are read in several ways.
void announce(const LoadSession& session) {
  if (!session.source.traits().ascending || session.options.parts) return;
  std::vector<io::Stretch> stretches;
  stretches.reserve(session.plan.units.size());
  for (const Unit& unit : session.plan.units) stretches.push_back({unit.offset, unit.nbytes});
  session.source.expect(stretches);
}

bool is_brief_plan(const LoadSession& session) {
  const device::CopyEngine* const engine = session.options.engine;
  const bool not_ready = engine != nullptr && !engine->is_ready();
  const io::SourceTraits traits = session.source.traits();
  // Reads at growing offsets may wait for those of another load, which may fail.
  if (!traits.in_memory || traits.ascending || session.has_crypt_info() || not_ready ||
      session.plan.units.size() > kBriefUnits)
    return false;
  uint64_t total = 0;
  for (const Unit& unit : session.plan.units)
    total += unit.read == Unit::Read::separate_reads ? unit.placed_nbytes : unit.nbytes;
  return total <= io::kBriefNbytes;
}

// Parts of tensors that were written without data.
void fill_zeros(const LoadSession& session) {
  if (session.options.engine != nullptr) return;  // the caller has done that
  for (const LoadTarget& target : session.targets) {
    if (session.opened->index[target.entry].data_nbytes == 0 && target.runs.nbytes() > 0)
      std::memset(target.destination.data, 0, target.runs.nbytes());
  }
}

void start_digests(LoadSession& session) {
  const auto check = [&session](uint32_t record, const digest::RecordDigests& digests) {
    session.naming(record, [&] {
      format::check_hashes(session.headers->header(record), &digests.crc32, &digests.sha256);
    });
  };
  // On the host, hashes are made of the tensors' own memory.
  const digest::RecordDigester::Use use{
      .workers = std::min(workers_of_plan(session), cpu_quota()),
      .bytes_stay = session.options.engine == nullptr,
      .gathered = session.plan.units_share_buffers
                      ? digest::Sha256::lanes() * useful_workers(session)
                      : digest::kDealtPerWorker};
  session.digester = std::make_unique<digest::RecordDigester>(session.plan.hash_steps, use, check);
}

}  // namespace

unsigned useful_workers(const LoadSession& session) {
  const io::SourceTraits traits = session.source.traits();
  unsigned workers = traits.sequential ? 1 : std::max(1U, traits.concurrency);
  if (session.options.verify || session.has_crypt_info()) workers = std::max(workers, cpu_quota());
  if (session.options.max_workers > 0) workers = std::min(workers, session.options.max_workers);
  return session.is_brief ? 1 : workers;
}

unsigned workers_of_plan(const LoadSession& session) {
  return static_cast<unsigned>(
      std::clamp<size_t>(session.plan.units.size(), 1, useful_workers(session)));
}

void make_first_plan(LoadSession& session) {
  const io::RangeSource& source = session.source;
  LoadOptions& options = session.options;
  options.verify = compares(options, *session.opened, session.targets);
  if (options.parts && session.opened->binds_data_by_digests())
    throw Error(Errc::invalid_argument,
                source.name() + " is signed and in clear: only whole tensors can be checked",
                source.name());
  if (session.has_crypt_info() && options.keys == nullptr)
    throw Error(Errc::crypto, source.name() + " is encrypted, but no key was given", source.name());
  check_records(session);
  if (!options.parts) {
    session.plan = plan_whole(session);
  } else if (session.has_crypt_info()) {
    // How parts of encrypted tensors are cut depends on the chunks that their headers state.
    session.plan = plan_headers(session.opened->index, session.entries, source.traits());
  } else {
    session.plan = plan_parts(session);
  }
  announce(session);
  session.is_brief = is_brief_plan(session);
  if (options.verify) start_digests(session);
}

bool begin_next_plan(LoadSession& session) {
  const unsigned number = session.plans_begun++;
  if (number == 0 && session.options.parts) fill_zeros(session);
  // Where the chunks of parts are is known once their headers are read.
  if (number > 0) {
    if (number > 1 || !session.options.parts || !session.has_crypt_info()) return false;
    session.plan = plan_parts(session);
  }
  session.forget_progress();
  return true;
}

void divide_read_buffers(LoadSession& session, unsigned workers) {
  const device::CopyEngine* const engine = session.options.engine;
  if (engine == nullptr) return;
  const uint64_t each = engine->buffer_nbytes() * std::max(workers, 1U);
  session.read_buffers = static_cast<unsigned>(
      std::clamp<uint64_t>(kReadBuffersNbytes / each, 1, session.digester ? kReadBuffers : 1));
}

}  // namespace tensorizer::load
