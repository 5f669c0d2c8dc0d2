#include "load/load_job.h"

#include "format/tensor_path.h"
#include "load/authenticity.h"

namespace tensorizer::load {
namespace {

std::vector<uint32_t> entries_of(const std::vector<LoadTarget>& targets) {
  std::vector<uint32_t> entries;
  entries.reserve(targets.size());
  for (const LoadTarget& target : targets) entries.push_back(target.entry);
  return entries;
}

}  // namespace

LoadJob::LoadJob(io::RangeSource& from, std::shared_ptr<const OpenedIndex> index,
                 std::vector<LoadTarget> to, const LoadOptions& chosen)
    : source(from),
      opened(std::move(index)),
      targets(std::move(to)),
      options(chosen),
      headers(std::make_shared<LoadedHeaders>(opened, entries_of(targets))) {}

void LoadJob::rethrow_named(uint32_t target, const Error& error) const {
  if (error.code() == Errc::cancelled) throw;
  const format::IndexEntry& entry = entry_of(target);
  const std::string tensor = "tensor " + format::display_name(entry.name) + ": ";
  std::string text = error.what();
  if (text.find(tensor) == std::string::npos) text.insert(0, tensor);
  Error named(error.code(), source.name() + ": " + text, source.name(),
              error.offset.value_or(entry.offset));
  named.system_errno = error.system_errno;
  throw named;
}

std::optional<digest::RecordStart> LoadJob::accept_header(uint32_t target,
                                                          std::span<const std::byte> bytes,
                                                          format::RecordHeader& header) {
  const format::IndexEntry& entry = entry_of(target);
  std::optional<digest::RecordStart> start;
  naming(target, [&] {
    header = accept_record(*opened, targets[target].entry, bytes);
    headers->keep(target, header, bytes);
    // Tensors without data have nothing that a hash of data could prove (format.md 6.3).
    if (!digester || entry.zero_filled()) return;
    format::HashChoice stored{.crc32 = false, .sha256 = false};
    for (const format::StoredHash& hash : header.hashes)
      (hash.type == format::HashType::crc32 ? stored.crc32 : stored.sha256) = true;
    start = {format::digest_header(bytes, header, stored.crc32, stored.sha256), stored};
  });
  if (!start || plan.hash_steps[target] == 0) return start;
  digester->expect(target, *start);
  return std::nullopt;
}

void start_digests(LoadJob& job, digest::RecordDigester::Use use) {
  const auto check = [&job](uint32_t target, const digest::RecordDigests& digests) {
    job.naming(target, [&] {
      format::check_hashes(job.headers->header(target), &digests.crc32, &digests.sha256);
    });
  };
  job.digester = std::make_unique<digest::RecordDigester>(job.plan.hash_steps, use, check);
}

}  // namespace tensorizer::load
