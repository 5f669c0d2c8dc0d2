#include "load/load_session.h"

#include <algorithm>
#include <utility>

#include "format/tensor_path.h"
#include "load/accept_record.h"
#include "load/session_plan.h"

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

LoadSession::LoadSession(io::RangeSource& from, std::shared_ptr<const OpenedIndex> index,
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
  if (options.parts) {
    records.reserve(targets.size());
    for (const LoadTarget& target : targets) {
      const auto at = std::lower_bound(entries.begin(), entries.end(), target.entry);
      records.push_back(static_cast<uint32_t>(at - entries.begin()));
    }
  }
  make_first_plan(*this);
}

void LoadSession::rethrow_named(uint32_t record, const Error& error) const {
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

std::optional<digest::RecordStart> LoadSession::accept_header(uint32_t record,
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

void LoadSession::forget_progress() {
  reads = std::make_unique<Turns>();
  progress_ = std::vector<std::atomic<Progress>>(plan.units.size());
}

void LoadSession::allocate_while_it_runs(std::vector<MemoryGroup> to_allocate, MemoryMaker maker) {
  groups = std::move(to_allocate);
  memory = std::move(maker);
  if (!groups.empty()) ready_ = std::vector<std::atomic<bool>>(targets.size());
}

void LoadSession::allocate_now() {
  for (size_t group = 0; group < groups.size(); ++group) {
    allocate_group(group);
    memory_is_ready({&group, 1});
  }
  groups.clear();
}

void LoadSession::allocate_group(size_t group) {
  allocate(groups[group], *opened, source, memory, targets);
}

void LoadSession::memory_is_ready(std::span<const size_t> of_groups) {
  {
    const MutexLock lock(mutex_);
    for (const size_t group : of_groups)
      for (const MemoryGroup::Member& member : groups[group].members)
        ready_[member.target].store(true, std::memory_order_release);
  }
  changed_.notify_all();
}

void LoadSession::wait_for_memory(uint32_t target, const std::stop_token& stop) {
  const auto is_here = [&] { return has_memory(target); };
  if (is_here()) return;
  const MutexLock lock(mutex_);
  if (!changed_.wait(mutex_, stop, is_here)) throw Error(Errc::cancelled, "cancelled");
}

void LoadSession::wait_for_header(uint32_t record, const std::stop_token& stop) {
  const auto is_here = [&] { return accepted_[record].load(std::memory_order_acquire); };
  if (is_here()) return;
  const MutexLock lock(mutex_);
  if (!changed_.wait(mutex_, stop, is_here)) throw Error(Errc::cancelled, "cancelled");
}

}  // namespace tensorizer::load
