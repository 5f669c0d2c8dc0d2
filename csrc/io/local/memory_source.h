// A source over bytes in memory that somebody else keeps alive. Immutable, safe from any thread.
#pragma once

#include <atomic>
#include <memory>
#include <string>

#include "io/range_source.h"

namespace tensorizer::io {

class MemorySource final : public RangeSource {
 public:
  // `owner` keeps `bytes` alive (may be null where the caller does).
  MemorySource(std::span<const std::byte> bytes, std::string name,
               std::shared_ptr<void> owner = nullptr);

  const std::string& name() const noexcept override { return name_; }
  std::optional<uint64_t> size() const override { return bytes_.size(); }
  SourceTraits traits() const override;
  using RangeSource::read_at;
  void read_at(uint64_t offset, std::span<const Slice> slices,
               const std::stop_token& stop) override;
  const std::byte* view(uint64_t offset, uint64_t nbytes) noexcept override;
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
