// A source over bytes in memory that somebody else keeps alive. Immutable, safe from any thread.
#pragma once

#include <atomic>
#include <cstring>
#include <memory>
#include <string>

#include "core/threads.h"
#include "io/range_source.h"

namespace tensorizer::io {

class MemorySource final : public RangeSource {
 public:
  // `owner` keeps `bytes` alive (may be null where the caller does).
  MemorySource(std::span<const std::byte> bytes, std::string name,
               std::shared_ptr<void> owner = nullptr)
      : bytes_(bytes), name_(std::move(name)), owner_(std::move(owner)) {}

  const std::string& name() const noexcept override { return name_; }
  std::optional<uint64_t> size() const override { return bytes_.size(); }
  SourceTraits traits() const override { return {.concurrency = cpu_quota(), .in_memory = true}; }
  using RangeSource::read_at;
  void read_at(uint64_t offset, std::span<const Buffer> buffers,
               const std::stop_token& /*stop*/) override {
    const uint64_t wanted = total_nbytes(buffers);
    const std::byte* from = view(offset, wanted);
    if (from == nullptr) throw_truncated(name_, offset, wanted, bytes_.size());
    for (const Buffer& buffer : buffers) {
      if (!buffer.empty()) std::memcpy(buffer.data(), from, buffer.size());
      from += buffer.size();
    }
    bytes_read_.fetch_add(wanted, std::memory_order_relaxed);
  }
  const std::byte* view(uint64_t offset, uint64_t nbytes) noexcept override {
    if (offset > bytes_.size() || nbytes > bytes_.size() - offset) return nullptr;
    return bytes_.data() + offset;
  }
  uint64_t bytes_read() const noexcept override {
    return bytes_read_.load(std::memory_order_relaxed);
  }

 private:
  std::span<const std::byte> bytes_;
  std::string name_;
  std::shared_ptr<void> owner_;
  std::atomic<uint64_t> bytes_read_{0};
};

}  // namespace tensorizer::io
