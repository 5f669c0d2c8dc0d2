// A regular local file, read with positional reads on a descriptor of its own. Safe from many threads.
//
// What the page cache holds is read from there. What it does not hold is read past it (O_DIRECT), which
// is faster than letting the kernel read ahead and leaves other programs' cache alone.
#pragma once

#include <atomic>
#include <memory>
#include <string>

#include "core/unique_fd.h"
#include "io/range_source.h"

namespace tensorizer::io {

class FileSource final : public RangeSource {
 public:
  // Takes the descriptor of an open file. Throws Error: io (cannot be examined, not a regular file).
  FileSource(UniqueFd fd, std::string name);
  ~FileSource() override;

  const std::string& name() const noexcept override { return name_; }
  std::optional<uint64_t> size() const override { return nbytes_; }
  SourceTraits traits() const override;
  using RangeSource::read_at;
  void read_at(uint64_t offset, std::span<const Slice> slices, const std::stop_token& stop) override;
  uint64_t bytes_read() const noexcept override { return bytes_read_.load(std::memory_order_relaxed); }

  int fd() const noexcept { return fd_.get(); }

 private:
  bool is_cached(uint64_t offset, uint64_t nbytes) const noexcept;
  void read_cached(uint64_t offset, std::span<const Slice> slices, const std::stop_token& stop);
  void read_direct(uint64_t offset, std::span<const Slice> slices, const std::stop_token& stop);
  void direct_into(uint64_t offset, Slice into);
  void direct_bounced(uint64_t offset, Slice into);

  UniqueFd fd_;
  UniqueFd direct_fd_;  // the same file opened with O_DIRECT; empty where the file system has none
  std::string name_;
  uint64_t nbytes_ = 0;
  // An untouched mapping, only ever handed to mincore(): it cannot fault.
  std::byte* probe_ = nullptr;
  std::atomic<uint64_t> bytes_read_{0};
};

}  // namespace tensorizer::io
