#include "load/load_session.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "core/checked_math.h"
#include "core/error.h"
#include "core/pages.h"
#include "core/run_units.h"
#include "core/threads.h"
#include "crypto/chunked_box.h"
#include "digest/deal.h"
#include "format/safetensors.h"
#include "load/load_together.h"
#include "load/request_costs.h"
#include "load/slice_plan.h"

namespace tensorizer::load {
namespace {

constexpr uint64_t kUnsizedHeaderLimit = uint64_t{256} << 20;
constexpr uint64_t kUnsizedDataLimit = uint64_t{4} << 40;  // the plan of more would take memory
// Of parts: a read of what is in memory costs as much as copying so many bytes; a request elsewhere
// what its source says.
constexpr uint64_t kCachedRunGapNbytes = 256;
constexpr uint64_t kCachedPartGapNbytes = 4096;
// Between two values of a store there may be a hole, so that its source asks for nothing in vain;
// within a tensor is none.
constexpr uint64_t kLeastRunGapNbytes = 4096;
// Of units for a device that come from a source that waits: for each worker, where they are hashed
// from there.
constexpr uint64_t kReadBuffers = 3;
// Where many streams are hashed side by side, units are so much shorter: there are enough steps to
// fill the lanes of SHA-256 while they are in the cache, and in the three buffers of a worker.
constexpr uint64_t kShorterToHash = 8;
constexpr size_t kBriefUnits = 512;
constexpr size_t kWipedAtOnce = 1024;  // destinations on a device, between two waits

// A container without record headers has no digests to compare: its index says all there is to
// know. Nor has a part. Data of a signed file in clear are compared whether or not somebody asks
// for it.
bool compares(const LoadOptions& options, const OpenedIndex& opened,
              const std::vector<LoadTarget>& targets) {
  if (options.parts) return false;
  const bool data = std::ranges::any_of(
      targets, [](const LoadTarget& t) { return !t.in_place || t.destination.data != nullptr; });
  return (options.verify && opened.has_record_headers()) ||
         (data && opened.binds_data_by_digests());
}

}  // namespace

LoadSession::LoadSession(io::RangeSource& source, const std::shared_ptr<const OpenedIndex>& opened,
                         std::vector<LoadTarget> targets, const LoadOptions& options)
    : job_(source, opened, std::move(targets), options) {
  job_.options.verify = compares(options, *opened, job_.targets);
  if (options.parts && opened->binds_data_by_digests())
    throw Error(Errc::invalid_argument,
                source.name() + " is signed and in clear: only whole tensors can be checked",
                source.name());
  if (job_.has_crypt_info() && job_.options.keys == nullptr)
    throw Error(Errc::crypto, source.name() + " is encrypted, but no key was given", source.name());
  check_records();
  if (job_.options.parts) {
    // How parts of encrypted tensors are cut depends on the chunks that their headers state.
    job_.plan = job_.has_crypt_info() ? plan_headers(opened->index, job_.entries, source.traits())
                                      : plan_parts();
  } else {
    job_.plan = plan_whole();
  }
  brief_ = is_brief_plan();
  if (job_.options.verify) {
    // On the host, hashes are made of the tensors' own memory.
    start_digests(job_, {.workers = std::min(workers_of_plan(), cpu_quota()),
                         .bytes_stay = job_.options.engine == nullptr,
                         .gathered = job_.plan.units_share_buffers
                                         ? digest::Sha256::lanes() * useful_workers()
                                         : digest::kDealtPerWorker});
  }
}

LoadSession::~LoadSession() = default;

// What the index claims, before it sizes anything. Records do not overlap: the sums are below 2^64.
void LoadSession::check_records() const {
  uint64_t header_nbytes = 0, data_nbytes = 0;
  for (uint32_t record = 0; record < job_.entries.size(); ++record) {
    const format::IndexEntry& entry = job_.entry_of(record);
    const uint64_t most = format::max_record_header_nbytes(entry, job_.has_crypt_info());
    job_.naming(record, [&] {
      const bool no_elements = job_.options.parts && entry.itemsize == 0;
      if (no_elements || (!job_.reads_headers() && entry.dtype.empty()))
        throw Error(Errc::malformed, format::why_not_loadable(entry));
      if (job_.reads_headers() && entry.header_nbytes() > most)
        throw Error(Errc::malformed, "the index leaves " + std::to_string(entry.header_nbytes()) +
                                         " bytes for its record header, at most " +
                                         std::to_string(most) + " are possible");
    });
    if (job_.options.parts) continue;  // the caller has memory for them
    header_nbytes += entry.header_nbytes();
    data_nbytes += entry.data_nbytes;
  }
  if (job_.source.size()) return;
  const auto refuse = [&](const char* what, uint64_t nbytes) {
    throw Error(Errc::malformed, job_.source.name() + ": " + what + " claim " +
                                     std::to_string(nbytes) + " bytes in a source of unknown size");
  };
  if (data_nbytes > kUnsizedDataLimit) refuse("tensors", data_nbytes);
  if (header_nbytes > kUnsizedHeaderLimit) refuse("record headers", header_nbytes);
}

unsigned LoadSession::useful_workers() const {
  const io::SourceTraits traits = job_.source.traits();
  unsigned workers = traits.sequential ? 1 : std::max(1U, traits.concurrency);
  if (job_.options.verify || job_.has_crypt_info()) workers = std::max(workers, cpu_quota());
  if (job_.options.max_workers > 0) workers = std::min(workers, job_.options.max_workers);
  return brief_ ? 1 : workers;
}

unsigned LoadSession::workers_of_plan() const {
  return static_cast<unsigned>(std::clamp<size_t>(job_.plan.units.size(), 1, useful_workers()));
}

uint64_t LoadSession::unit_nbytes() const {
  const io::SourceTraits traits = job_.source.traits();
  const device::CopyEngine* const engine = job_.options.engine;
  // A unit for a device fills a buffer, whose chunks are opened a few at a time.
  const bool in_cache = engine == nullptr || job_.options.parts;
  if (in_cache && job_.has_crypt_info() && traits.gap_nbytes <= kCheapRequestNbytes)
    return kCipherChunkNbytes;
  return engine ? std::min(traits.unit_nbytes, engine->buffer_nbytes()) : traits.unit_nbytes;
}

LoadPlan LoadSession::plan_whole() const {
  const io::SourceTraits traits = job_.source.traits();
  const LoadOptions& options = job_.options;
  const bool all_in_place = std::ranges::all_of(job_.targets, &LoadTarget::in_place);
  if (all_in_place && !job_.targets.empty() && !options.verify)
    return plan_headers(job_.opened->index, job_.entries, traits);

  const unsigned workers = useful_workers();
  const size_t lanes = digest::Sha256::lanes();
  // Hashing takes longer than reading: as many chains as there are lanes, and soon.
  bool fills_lanes = options.verify && traits.prompt;
  PlanOptions plan;
  plan.unit_nbytes = unit_nbytes();
  plan.gap_nbytes = traits.gap_nbytes;
  if (job_.has_crypt_info()) plan.cut_nbytes = kCipherChunkNbytes;
  if (options.engine != nullptr) {
    plan.buffer_nbytes = options.engine->buffer_nbytes();
    fills_lanes = fills_lanes && workers > 1 && lanes >= digest::kManyLanes;
    // Bytes leave their buffer once they are hashed: several chains must be under way.
    if (options.verify && workers > 1 && !traits.sequential)
      plan.large_at_once = digest::kDealtPerWorker * workers;
  }
  if (fills_lanes) {
    if (plan.large_at_once > 0) plan.large_at_first = plan.large_at_once;
    plan.large_at_once = lanes * workers;
    // Each begins in a buffer where it does in its page of the file, which takes a little room.
    if (lanes >= digest::kManyLanes) {
      const uint64_t shorter = align_down(plan.unit_nbytes / kShorterToHash - 1, plan.cut_nbytes);
      plan.unit_nbytes = std::min(plan.unit_nbytes, std::max(shorter, plan.cut_nbytes));
    }
    plan.whole_nbytes = plan.unit_nbytes / 8;  // what would be hashed alone joins the others
  }
  if (plan.large_at_once == 0) plan.streams = std::min(traits.streams, workers);
  LoadPlan made = plan_load(job_.opened->index, job_.entries, plan);
  made.units_share_buffers = fills_lanes && options.engine != nullptr;
  return made;
}

LoadPlan LoadSession::plan_parts() const {
  const io::SourceTraits traits = job_.source.traits();
  SlicePlanOptions plan;
  plan.unit_nbytes = unit_nbytes();
  const std::optional<uint64_t>& wanted = job_.options.gap_nbytes;
  if (traits.prompt) {
    plan.run_gap_nbytes = wanted.value_or(kCachedRunGapNbytes);
    plan.part_gap_nbytes = wanted.value_or(kCachedPartGapNbytes);
  } else {
    plan.run_gap_nbytes = wanted.value_or(std::max(traits.gap_nbytes, kLeastRunGapNbytes));
    plan.part_gap_nbytes = wanted.value_or(traits.gap_nbytes);
    plan.runs_at_once = 1;
  }
  std::vector<SlicePart> parts;
  parts.reserve(job_.targets.size());
  for (uint32_t target = 0; target < job_.targets.size(); ++target) {
    const uint32_t record = job_.record_of(target);
    const format::IndexEntry& entry = job_.entry_of(record);
    parts.push_back({.record = record,
                     .payload = entry.data_offset,
                     .payload_nbytes = entry.data_nbytes,
                     .chunk_nbytes = job_.cipher ? job_.cipher->chunk_nbytes(record) : 0});
    if (entry.data_nbytes > 0) parts.back().runs = job_.targets[target].runs;  // else: zeros
  }
  return plan_slices(parts, plan);
}

bool LoadSession::is_brief_plan() const {
  const device::CopyEngine* const engine = job_.options.engine;
  const bool waits = engine != nullptr && !engine->is_ready();
  if (!job_.source.traits().prompt || job_.has_crypt_info() || waits ||
      job_.plan.units.size() > kBriefUnits)
    return false;
  uint64_t total = 0;
  for (const Unit& unit : job_.plan.units)
    total += unit.read == Unit::Read::apart ? unit.placed_nbytes : unit.nbytes;
  return total <= kBriefNbytes;
}

void LoadSession::run(const std::stop_token& stop) {
  LoadSession* const alone = this;
  load_together({&alone, 1}, 1, {}, stop);
}

void LoadSession::allocate_while_it_runs(std::vector<MemoryGroup> groups, MemoryMaker memory) {
  groups_ = std::move(groups);
  memory_ = std::move(memory);
  if (!groups_.empty()) job_.expect_memory();
}

void LoadSession::allocate_now() {
  for (size_t group = 0; group < groups_.size(); ++group) allocate_group(group);
  for (const MemoryGroup& group : std::exchange(groups_, {})) job_.memory_is_ready(group.members);
}

void LoadSession::allocate_group(size_t group) {
  allocate(groups_[group], *job_.opened, job_.source, memory_, job_.targets);
}

void LoadSession::memory_is_ready(std::span<const size_t> groups) {
  for (const size_t group : groups) job_.memory_is_ready(groups_[group].members);
}

bool LoadSession::begin_plan(unsigned workers) {
  const unsigned number = plans_begun_++;
  if (number == 0 && job_.options.parts) fill_zeros();
  // Where the chunks of parts are is known once their headers are read.
  if (number > 0) {
    if (number > 1 || !job_.options.parts || !job_.has_crypt_info()) return false;
    job_.plan = plan_parts();
  }
  job_.begin_plan();
  if (job_.options.engine != nullptr) {
    const uint64_t each = job_.options.engine->buffer_nbytes() * std::max(workers, 1U);
    job_.read_buffers = static_cast<unsigned>(
        std::clamp<uint64_t>(kReadBuffersNbytes / each, 1, job_.digester ? kReadBuffers : 1));
  }
  return true;
}

void LoadSession::blame_source(const Error& error) {
  const bool of_bytes = error.code() == Errc::malformed || error.code() == Errc::truncated ||
                        error.code() == Errc::hash_mismatch || error.code() == Errc::crypto ||
                        error.code() == Errc::authentication;
  if (!of_bytes) return;
  job_.source.check_unchanged();
  drop_damaged_copy(job_.source, error);
}

// Parts of tensors that were written without data.
void LoadSession::fill_zeros() {
  if (job_.options.engine != nullptr) return;  // whoever made the destinations has done that
  for (const LoadTarget& target : job_.targets) {
    if (job_.opened->index[target.entry].data_nbytes == 0 && target.runs.nbytes() > 0)
      std::memset(target.destination.data, 0, target.runs.nbytes());
  }
}

// Only what a worker may have filled: touching the rest would cost its memory and its time. Nobody
// can stop this, so it must be short: pages of ours are given back, not written.
void LoadSession::wipe_destinations() noexcept {
  if (!job_.has_crypt_info() || plans_begun_ == 0) return;
  if (job_.options.engine != nullptr) return wipe_on_device();
  const auto wipe_unit = [&](size_t i, const std::stop_token&) {
    if (job_.progress_of(i) == LoadJob::Progress::none) return;
    for (const Piece& piece : job_.plan.pieces_of(job_.plan.units[i])) {
      const device::DeviceRange range = filled_by(piece);
      const std::span<std::byte> bytes(range.device_address, range.nbytes);
      if (!bytes.empty() && job_.targets[piece.target].destination.owner) {
        clear_pages(bytes);
      } else {
        crypto::wipe(bytes);  // the caller's, which may be shared memory
      }
    }
  };
  const size_t count = job_.plan.units.size();
  try {
    for_each_index(count, workers_of_plan(), {}, wipe_unit);
  } catch (...) {  // no memory for threads: here, then
    for (size_t i = 0; i < count; ++i) wipe_unit(i, {});
  }
}

// On a device, what was begun goes too where copies came that far: the caller's work that was to
// come first is over then. Where it may not be, only what copies have begun to fill.
void LoadSession::wipe_on_device() noexcept {
  const bool all = job_.has_placed() && job_.options.engine->is_ready();
  std::array<device::DeviceRange, kWipedAtOnce> ranges;
  size_t count = 0;
  for (size_t i = 0; i < job_.plan.units.size(); ++i) {
    const LoadJob::Progress progress = job_.progress_of(i);
    if (progress != LoadJob::Progress::placed && (!all || progress == LoadJob::Progress::none))
      continue;
    for (const Piece& piece : job_.plan.pieces_of(job_.plan.units[i])) {
      const device::DeviceRange range = filled_by(piece);
      if (range.nbytes == 0 || !job_.has_memory(piece.target)) continue;
      ranges[count++] = range;
      if (count < ranges.size()) continue;
      job_.options.engine->wipe(ranges);
      count = 0;
    }
  }
  if (count > 0) job_.options.engine->wipe(std::span(ranges).first(count));
}

// What a piece puts into its destination; whoever has the header of a tensor whose chunks straddle
// its pieces puts all of them there.
device::DeviceRange LoadSession::filled_by(const Piece& piece) const noexcept {
  std::byte* const data = job_.targets[piece.target].destination.data;
  if (piece.kind == Piece::Kind::payload) return {data + piece.place, piece.nbytes};
  if (!job_.cipher || !job_.cipher->straddles(piece.target)) return {nullptr, 0};
  return {data, job_.entry_of(piece.target).data_nbytes};
}

}  // namespace tensorizer::load
