#include "load/slice_session.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "core/error.h"
#include "core/run_units.h"
#include "core/threads.h"
#include "crypto/chunked_box.h"
#include "format/safetensors.h"
#include "load/changed_source.h"
#include "load/request_costs.h"
#include "load/slice_worker.h"

namespace tensorizer::load {
namespace {

// A read of what is in memory costs as much as copying so many bytes; a request elsewhere what its
// source says.
constexpr uint64_t kCachedRunGapNbytes = 256;
constexpr uint64_t kCachedPartGapNbytes = 4096;
// Between two values of a store there may be a hole, so that its source asks for nothing in vain;
// within a tensor is none.
constexpr uint64_t kLeastRunGapNbytes = 4096;

std::vector<LoadTarget> records_of(const std::vector<SliceTarget>& targets) {
  std::vector<uint32_t> entries;
  entries.reserve(targets.size());
  for (const SliceTarget& target : targets) entries.push_back(target.entry);
  std::sort(entries.begin(), entries.end());
  entries.erase(std::unique(entries.begin(), entries.end()), entries.end());
  std::vector<LoadTarget> records;
  records.reserve(entries.size());
  for (const uint32_t entry : entries) records.push_back({.entry = entry});
  return records;
}

// Reads record headers and takes what the cipher needs of them.
class HeaderWorker final : public UnitWorker {
 public:
  HeaderWorker(LoadJob& job, PayloadCipher& cipher, const std::stop_token& stop)
      : job_(job), cipher_(cipher), stop_(stop) {}

  void process(size_t number) override {
    const Unit& unit = job_.plan.units[number];
    if (image_.size() < unit.nbytes) image_.resize(unit.nbytes);
    job_.source.read_at(unit.offset, io::Slice(image_).first(unit.nbytes), stop_);
    for (const Piece& piece : job_.plan.pieces_of(unit)) {
      const std::span<const std::byte> bytes(image_.data() + piece.unit_offset, piece.nbytes);
      format::RecordHeader header;
      job_.accept_header(piece.target, bytes, header);
      job_.naming(piece.target, [&] { cipher_.accept(piece.target, header, 1); });
    }
  }

 private:
  LoadJob& job_;
  PayloadCipher& cipher_;
  const std::stop_token stop_;
  std::vector<std::byte> image_;
};

}  // namespace

SliceSession::SliceSession(io::RangeSource& source,
                           const std::shared_ptr<const OpenedIndex>& opened,
                           std::vector<SliceTarget> targets, const SliceOptions& options)
    : targets_(std::move(targets)),
      gap_nbytes_(options.gap_nbytes),
      job_(source, opened, records_of(targets_), options.load) {
  if (has_crypt_info() && job_.options.keys == nullptr)
    throw Error(Errc::crypto, source.name() + " is encrypted, but no key was given", source.name());
  if (opened->binds_data_by_digests())
    throw Error(Errc::invalid_argument,
                source.name() + " is signed and in clear: only whole tensors can be checked",
                source.name());
  for (uint32_t record = 0; record < job_.targets.size(); ++record) {
    const format::IndexEntry& entry = job_.entry_of(record);
    job_.naming(record, [&] {
      if (entry.dtype.empty() || entry.itemsize == 0)
        throw Error(Errc::malformed, format::why_not_loadable(entry));
      const uint64_t most = format::max_record_header_nbytes(entry, has_crypt_info());
      if (has_crypt_info() && entry.header_nbytes() > most)
        throw Error(Errc::malformed, "the index leaves " + std::to_string(entry.header_nbytes()) +
                                         " bytes for its record header, at most " +
                                         std::to_string(most) + " are possible");
    });
  }
  if (!has_crypt_info()) plan_plain();
}

SliceSession::~SliceSession() = default;

void SliceSession::plan_plain() {
  make_plan();
  const bool waits = job_.options.engine != nullptr && !job_.options.engine->is_ready();
  if (!job_.source.traits().prompt || waits || plan_.units.size() > kBriefUnits) return;
  uint64_t total = 0;
  for (const SliceUnit& unit : plan_.units) total += unit.placed_nbytes;
  brief_ = total <= kBriefNbytes;
}

void SliceSession::make_plan() {
  const io::SourceTraits traits = job_.source.traits();
  SlicePlanOptions options;
  options.unit_nbytes = traits.unit_nbytes;
  if (job_.options.engine != nullptr)
    options.unit_nbytes = std::min(options.unit_nbytes, job_.options.engine->buffer_nbytes());
  const bool cheap = traits.gap_nbytes <= kCheapRequestNbytes;
  if (has_crypt_info() && cheap)
    options.unit_nbytes = std::min(options.unit_nbytes, format::kCipherChunkNbytes);
  options.run_gap_nbytes = gap_nbytes_.value_or(
      traits.prompt ? kCachedRunGapNbytes : std::max(traits.gap_nbytes, kLeastRunGapNbytes));
  options.part_gap_nbytes =
      gap_nbytes_.value_or(traits.prompt ? kCachedPartGapNbytes : traits.gap_nbytes);
  if (!traits.prompt) options.runs_at_once = 1;

  std::vector<uint64_t> chunks(job_.targets.size());
  for (uint32_t record = 0; record < chunks.size(); ++record)
    if (cipher_) chunks[record] = cipher_->chunk_nbytes(record);
  parts_.reserve(targets_.size());
  for (const SliceTarget& target : targets_) {
    const auto at = std::lower_bound(
        job_.targets.begin(), job_.targets.end(), target.entry,
        [](const LoadTarget& record, uint32_t entry) { return record.entry < entry; });
    const auto record = static_cast<uint32_t>(at - job_.targets.begin());
    const format::IndexEntry& entry = job_.entry_of(record);
    parts_.push_back({.record = record,
                      .payload = entry.data_offset,
                      .payload_nbytes = entry.data_nbytes,
                      .chunk_nbytes = chunks[record]});
    if (entry.data_nbytes > 0) parts_.back().runs = target.runs;  // else: zeros, nothing to read
  }
  plan_ = plan_slices(parts_, options);
}

unsigned SliceSession::workers_for(size_t units) const {
  const io::SourceTraits traits = job_.source.traits();
  unsigned workers = traits.sequential ? 1 : std::max(1U, traits.concurrency);
  if (!traits.sequential && has_crypt_info()) workers = std::max(workers, cpu_quota());
  if (job_.options.max_workers > 0) workers = std::min(workers, job_.options.max_workers);
  if (brief_) workers = 1;
  return static_cast<unsigned>(std::clamp<size_t>(units, 1, workers));
}

void SliceSession::run(const std::stop_token& stop) {
  try {
    run_and_compare(stop);
  } catch (...) {
    if (has_crypt_info()) wipe_destinations();
    throw;
  }
}

void SliceSession::run_and_compare(const std::stop_token& stop) {
  try {
    if (has_crypt_info()) {
      read_headers(stop);
      make_plan();
    }
    fill_zeros();
    const SliceWork work{job_, targets_, parts_, plan_, cipher_.get()};
    job_.next_unit = 0;
    const size_t units = plan_.units.size();
    run_units(units, job_.next_unit, workers_for(units), stop,
              [&](const std::stop_token& token) { return make_slice_worker(work, token); });
  } catch (const Error& error) {
    const bool of_bytes = error.code() == Errc::malformed || error.code() == Errc::truncated ||
                          error.code() == Errc::crypto || error.code() == Errc::authentication;
    if (of_bytes) blame_change(job_.source);
    throw;
  }
  check_unchanged(job_, stop);
}

void SliceSession::read_headers(const std::stop_token& stop) {
  cipher_ = std::make_unique<PayloadCipher>(*job_.opened, *job_.options.keys, job_.targets.size());
  const io::SourceTraits traits = job_.source.traits();
  std::vector<uint32_t> entries;
  entries.reserve(job_.targets.size());
  for (const LoadTarget& record : job_.targets) entries.push_back(record.entry);
  job_.plan = plan_load(job_.opened->index, entries,
                        {.unit_nbytes = traits.unit_nbytes,
                         .gap_nbytes = std::min(kHeaderGapNbytes, traits.gap_nbytes),
                         .payloads = false});
  const size_t units = job_.plan.units.size();
  run_units(units, job_.next_unit, workers_for(units), stop, [&](const std::stop_token& token) {
    return std::make_unique<HeaderWorker>(job_, *cipher_, token);
  });
}

// Of tensors that were written without data.
void SliceSession::fill_zeros() {
  if (job_.options.engine != nullptr) return;  // whoever made the destinations has done that
  for (const SliceTarget& target : targets_) {
    if (job_.opened->index[target.entry].data_nbytes == 0 && target.runs.nbytes() > 0)
      std::memset(target.destination.data, 0, target.runs.nbytes());
  }
}

void SliceSession::wipe_destinations() noexcept {
  std::array<device::DeviceRange, kWipedAtOnce> ranges;
  size_t count = 0;
  const size_t begun = std::min(job_.next_unit.load(), plan_.units.size());
  for (const SliceUnit& unit : std::span(plan_.units).first(begun)) {
    for (const SliceSegment& segment : plan_.segments_of(unit)) {
      std::byte* const to = targets_[segment.part].destination.data + segment.place;
      if (job_.options.engine == nullptr) {
        crypto::wipe({to, segment.nbytes});
        continue;
      }
      ranges[count++] = {to, segment.nbytes};
      if (count < ranges.size()) continue;
      job_.options.engine->wipe(ranges);
      count = 0;
    }
  }
  if (count > 0) job_.options.engine->wipe(std::span(ranges).first(count));
}

}  // namespace tensorizer::load
