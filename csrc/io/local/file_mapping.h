// A private, writable mapping of a whole local file: reads come from the page cache, writes stay in
// this process. Tensors made over it keep it alive. Immutable handle.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <stop_token>
#include <string>

namespace tensorizer::io {

class FileMapping {
 public:
  // Maps all bytes of the open file. Throws Error(io) where it cannot be mapped.
  static std::shared_ptr<FileMapping> create(int fd, uint64_t nbytes, const std::string& name);
  ~FileMapping();
  FileMapping(const FileMapping&) = delete;
  FileMapping& operator=(const FileMapping&) = delete;

  std::span<std::byte> bytes() const noexcept { return {data_, nbytes_}; }

  // Reads the pages of [offset, offset + nbytes) and maps them, on as many threads as there are
  // processors, so that later readers wait for nothing. Does nothing before Linux 5.14,
  // or where the file cannot. Throws Error(cancelled).
  void populate(uint64_t offset, uint64_t nbytes, const std::stop_token& stop) const;

 private:
  FileMapping(std::byte* data, uint64_t nbytes) noexcept : data_(data), nbytes_(nbytes) {}

  std::byte* data_;
  uint64_t nbytes_;
};

}  // namespace tensorizer::io
