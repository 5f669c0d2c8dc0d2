#include "load/load_session.h"

#include <algorithm>
#include <array>

#include "core/error.h"
#include "core/pages.h"
#include "core/run_units.h"
#include "core/threads.h"
#include "crypto/chunked_box.h"
#include "digest/deal.h"
#include "format/safetensors.h"
#include "load/changed_source.h"
#include "load/host_load.h"
#include "load/request_costs.h"
#include "load/staged_load.h"

namespace tensorizer::load {
namespace {

constexpr uint64_t kUnsizedHeaderLimit = uint64_t{256} << 20;
constexpr uint64_t kUnsizedDataLimit = uint64_t{4} << 40;  // the plan of more would take memory

// A container without record headers has no digests to compare: its index says all there is to
// know. Data of a signed file in clear are compared whether or not somebody asks for it.
LoadOptions possible(LoadOptions options, const OpenedIndex& opened,
                     const std::vector<LoadTarget>& targets) {
  const bool data = std::ranges::any_of(
      targets, [](const LoadTarget& t) { return !t.in_place || t.destination.data != nullptr; });
  options.verify =
      (options.verify && opened.has_record_headers()) || (data && opened.binds_data_by_digests());
  return options;
}

}  // namespace

LoadSession::LoadSession(io::RangeSource& source, const std::shared_ptr<const OpenedIndex>& opened,
                         std::vector<LoadTarget> targets, const LoadOptions& options)
    : job_(source, opened, targets, possible(options, *opened, targets)) {
  if (has_crypt_info() && options.keys == nullptr)
    throw Error(Errc::crypto, source.name() + " is encrypted, but no key was given", source.name());
  check_sizes();
  make_plan();
  if (job_.options.verify) {
    // On the host, hashes are made of the tensors' own memory.
    start_digests(job_, {.workers = std::min(workers_, cpu_quota()),
                         .bytes_stay = job_.options.engine == nullptr});
  }
}

LoadSession::~LoadSession() = default;

// What the index claims, before it sizes anything. Records do not overlap: the sums are below 2^64.
void LoadSession::check_sizes() const {
  uint64_t header_nbytes = 0, data_nbytes = 0;
  for (uint32_t target = 0; target < job_.targets.size(); ++target) {
    const format::IndexEntry& entry = job_.entry_of(target);
    const uint64_t most = format::max_record_header_nbytes(entry, has_crypt_info());
    job_.naming(target, [&] {
      if (!job_.opened->has_record_headers() && entry.dtype.empty())
        throw Error(Errc::malformed, format::why_not_loadable(entry));
      if (entry.header_nbytes() > most)
        throw Error(Errc::malformed, "the index leaves " + std::to_string(entry.header_nbytes()) +
                                         " bytes for its record header, at most " +
                                         std::to_string(most) + " are possible");
    });
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

void LoadSession::make_plan() {
  const io::SourceTraits traits = job_.source.traits();
  const LoadOptions& options = job_.options;
  const bool works_on_bytes = options.verify || has_crypt_info();
  workers_ = traits.sequential ? 1 : std::max(1U, traits.concurrency);
  if (works_on_bytes) workers_ = std::max(workers_, cpu_quota());
  if (options.max_workers > 0) workers_ = std::min(workers_, options.max_workers);

  PlanOptions plan;
  plan.unit_nbytes = traits.unit_nbytes;
  plan.gap_nbytes = traits.gap_nbytes;
  if (options.engine != nullptr) {
    plan.buffer_nbytes = options.engine->buffer_nbytes();
    plan.unit_nbytes = std::min(plan.unit_nbytes, plan.buffer_nbytes);
    // Bytes leave their buffer once they are hashed: several chains must be under way.
    if (options.verify && workers_ > 1 && !traits.sequential)
      plan.large_at_once = digest::kDealtPerWorker * workers_;
  } else if (options.verify && traits.prompt) {
    // Hashing takes longer than reading: as many chains as there are lanes, and soon, while the
    // bytes are in the cache. What would be hashed alone in its unit joins the others.
    plan.large_at_once = format::Sha256::lanes() * workers_;
    plan.whole_nbytes = plan.unit_nbytes / 8;
  }
  if (has_crypt_info()) {
    plan.cut_nbytes = format::kCipherChunkNbytes;
    if (traits.gap_nbytes <= kCheapRequestNbytes) plan.unit_nbytes = format::kCipherChunkNbytes;
  }
  const bool all_in_place =
      !job_.targets.empty() && std::all_of(job_.targets.begin(), job_.targets.end(),
                                           [](const LoadTarget& t) { return t.in_place; });
  if (all_in_place && !options.verify) {
    plan.payloads = false;
    plan.gap_nbytes = kHeaderGapNbytes;
  }
  std::vector<uint32_t> selection;
  selection.reserve(job_.targets.size());
  for (const LoadTarget& target : job_.targets) selection.push_back(target.entry);
  job_.plan = plan_load(job_.opened->index, selection, plan);

  const std::vector<Unit>& units = job_.plan.units;
  const bool waits = options.engine != nullptr && !options.engine->is_ready();
  if (traits.prompt && !has_crypt_info() && !waits && units.size() <= kBriefUnits) {
    uint64_t total = 0;
    for (const Unit& unit : units) total += unit.nbytes;
    brief_ = total <= kBriefNbytes;
  }
  if (brief_) workers_ = 1;
  workers_ = static_cast<unsigned>(std::clamp<size_t>(units.size(), 1, workers_));
}

void LoadSession::run(const std::stop_token& stop) {
  try {
    run_and_compare(stop);
  } catch (...) {
    if (has_crypt_info()) wipe_destinations();
    throw;
  }
}

// A source that changed meanwhile explains what is wrong with its bytes, or that nothing seems to
// be.
void LoadSession::run_and_compare(const std::stop_token& stop) {
  try {
    run_workers(stop);
  } catch (const Error& error) {
    const bool of_bytes = error.code() == Errc::malformed || error.code() == Errc::truncated ||
                          error.code() == Errc::hash_mismatch || error.code() == Errc::crypto ||
                          error.code() == Errc::authentication;
    if (of_bytes) blame_change(job_.source);
    throw;
  }
  check_unchanged(job_, stop);
}

void LoadSession::run_workers(const std::stop_token& stop) {
  const size_t units = job_.plan.units.size();
  if (is_staged()) {
    StagedLoad load(job_);
    run_units(units, job_.next_unit, workers_, stop,
              [&](const std::stop_token& token) { return load.make_worker(token); });
  } else {
    run_units(units, job_.next_unit, workers_, stop,
              [&](const std::stop_token& token) { return make_host_load(job_, token); });
  }
}

// Only what a worker may have filled: touching the rest would cost its memory and its time. Nobody
// can stop this, so it must be short: pages of ours are given back, not written.
void LoadSession::wipe_destinations() noexcept {
  if (job_.options.engine != nullptr) {
    wipe_on_device();
    return;
  }
  std::atomic<size_t> next{0};
  const auto wipe_units = [&](const std::stop_token&) {
    const size_t begun = std::min(job_.next_unit.load(), job_.plan.units.size());
    for (size_t i = next++; i < begun; i = next++) {
      for (const Piece& piece : job_.plan.pieces_of(job_.plan.units[i])) {
        const device::DeviceRange range = filled_by(piece);
        const std::span<std::byte> bytes(range.device_address, range.nbytes);
        if (job_.targets[piece.target].destination.owner) {
          clear_pages(bytes);
        } else {
          crypto::wipe(bytes);  // the caller's, which may be shared memory
        }
      }
    }
  };
  try {
    tensorizer::run_workers(workers_, {}, wipe_units);
  } catch (...) {  // no memory for threads: here, then
    wipe_units({});
  }
}

void LoadSession::wipe_on_device() noexcept {
  std::array<device::DeviceRange, kWipedAtOnce> ranges;
  size_t count = 0;
  const size_t begun = std::min(job_.next_unit.load(), job_.plan.units.size());
  for (const Unit& unit : std::span(job_.plan.units).first(begun)) {
    for (const Piece& piece : job_.plan.pieces_of(unit)) {
      const device::DeviceRange range = filled_by(piece);
      if (range.nbytes == 0) continue;
      ranges[count++] = range;
      if (count < ranges.size()) continue;
      job_.options.engine->wipe(ranges);
      count = 0;
    }
  }
  if (count > 0) job_.options.engine->wipe(std::span(ranges).first(count));
}

// What a piece puts into its destination.
device::DeviceRange LoadSession::filled_by(const Piece& piece) const noexcept {
  if (piece.kind != Piece::Kind::payload) return {nullptr, 0};
  return {job_.targets[piece.target].destination.data + piece.target_offset, piece.nbytes};
}

}  // namespace tensorizer::load
