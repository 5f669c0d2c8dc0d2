#include "io/local/memory_source.h"

#include <cstring>

#include "core/error.h"
#include "core/threads.h"

namespace tensorizer::io {

MemorySource::MemorySource(std::span<const std::byte> bytes, std::string name,
                           std::shared_ptr<void> owner)
    : bytes_(bytes), name_(std::move(name)), owner_(std::move(owner)) {}

SourceTraits MemorySource::traits() const { return {.concurrency = cpu_quota(), .prompt = true}; }

const std::byte* MemorySource::view(uint64_t offset, uint64_t nbytes) noexcept {
  if (offset > bytes_.size() || nbytes > bytes_.size() - offset) return nullptr;
  return bytes_.data() + offset;
}

void MemorySource::read_at(uint64_t offset, std::span<const Slice> slices,
                           const std::stop_token& /*stop*/) {
  const uint64_t wanted = total_nbytes(slices);
  const std::byte* from = view(offset, wanted);
  if (from == nullptr) throw_truncated(name_, offset, wanted, bytes_.size());
  for (const Slice& slice : slices) {
    if (!slice.empty()) std::memcpy(slice.data(), from, slice.size());
    from += slice.size();
  }
  bytes_read_.fetch_add(wanted, std::memory_order_relaxed);
}

}  // namespace tensorizer::io
