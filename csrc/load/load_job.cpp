#include "load/load_job.h"

#include <algorithm>

#include "format/tensor_path.h"
#include "load/accept_record.h"

namespace tensorizer::load {
namespace {

std::vector<uint32_t> entries_of(const std::vector<LoadTarget>& targets, bool parts) {
  std::vector<uint32_t> entries;
  entries.reserve(targets.size());
  for (const LoadTarget& target : targets) entries.push_back(target.entry);
  if (!parts) return entries;
  std::sort(entries.begin(), entries.end());
  entries.erase(std::unique(entries.begin(), entries.end()), entries.end());
  return entries;
}

}  // namespace

LoadJob::LoadJob(io::RangeSource& from, std::shared_ptr<const OpenedIndex> index,
                 std::vector<LoadTarget> to, const LoadOptions& chosen)
    : source(from),
      opened(std::move(index)),
      targets(std::move(to)),
      options(chosen),
      entries(entries_of(targets, options.parts)),
      headers(std::make_shared<LoadedHeaders>(opened, entries)),
      cipher(has_crypt_info() && options.keys != nullptr
                 ? std::make_unique<PayloadCipher>(*opened, *options.keys, entries.size())
                 : nullptr),
      accepted_(entries.size()) {
  if (!options.parts) return;
  records.reserve(targets.size());
  for (const LoadTarget& target : targets) {
    const auto at = std::lower_bound(entries.begin(), entries.end(), target.entry);
    records.push_back(static_cast<uint32_t>(at - entries.begin()));
  }
}

void LoadJob::rethrow_named(uint32_t record, const Error& error) const {
  if (error.code() == Errc::cancelled) throw;
  const format::IndexEntry& entry = entry_of(record);
  const std::string tensor = "tensor " + format::display_name(entry.name) + ": ";
  std::string text = error.what();
  if (text.find(tensor) == std::string::npos) text.insert(0, tensor);
  Error named(error.code(), source.name() + ": " + text, source.name(),
              error.offset.value_or(entry.offset));
  named.system_errno = error.system_errno;
  throw named;
}

std::optional<digest::RecordStart> LoadJob::accept_header(uint32_t record,
                                                          std::span<const std::byte> bytes) {
  const format::IndexEntry& entry = entry_of(record);
  const uint32_t steps = plan.hash_steps[record];
  std::optional<digest::RecordStart> start;
  naming(record, [&] {
    const format::RecordHeader header = accept_record(*opened, entries[record], bytes);
    if (cipher) cipher->accept(record, header, steps);
    const digest::HashChoice stored = format::stored_kinds(header);
    const digest::HeaderDigest digest = format::digest_header(bytes, header, stored);
    headers->keep(record, header, digest);
    // Tensors without data have nothing that a hash of data could prove (format.md 6.3).
    if (digester && !entry.zero_filled()) start = {digest, stored};
  });
  if (steps == 0) return start;
  if (start) digester->expect(record, *start);
  {
    const MutexLock lock(mutex_);
    accepted_[record].store(true, std::memory_order_release);
  }
  changed_.notify_all();
  return std::nullopt;
}

void LoadJob::begin_plan() {
  reads = std::make_unique<Turns>();
  progress_ = std::vector<std::atomic<Progress>>(plan.units.size());
}

void LoadJob::wait_for_memory(uint32_t target, const std::stop_token& stop) {
  const auto is_here = [&] { return has_memory(target); };
  if (is_here()) return;
  const MutexLock lock(mutex_);
  if (!changed_.wait(mutex_, stop, is_here)) throw Error(Errc::cancelled, "cancelled");
}

void LoadJob::wait_for_header(uint32_t record, const std::stop_token& stop) {
  const auto is_here = [&] { return accepted_[record].load(std::memory_order_acquire); };
  if (is_here()) return;
  const MutexLock lock(mutex_);
  if (!changed_.wait(mutex_, stop, is_here)) throw Error(Errc::cancelled, "cancelled");
}

void start_digests(LoadJob& job, digest::RecordDigester::Use use) {
  const auto check = [&job](uint32_t record, const digest::RecordDigests& digests) {
    job.naming(record, [&] {
      format::check_hashes(job.headers->header(record), &digests.crc32, &digests.sha256);
    });
  };
  job.digester = std::make_unique<digest::RecordDigester>(job.plan.hash_steps, use, check);
}

}  // namespace tensorizer::load
