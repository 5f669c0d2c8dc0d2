#include "io/local/file_mapping.h"

#include <sys/mman.h>

#include <cerrno>

#include "core/error.h"

namespace tensorizer::io {

std::shared_ptr<FileMapping> FileMapping::create(int fd, uint64_t nbytes, const std::string& name) {
  void* memory = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, fd, 0);
  if (memory == MAP_FAILED) throw_errno("cannot map", name, errno);
  return std::shared_ptr<FileMapping>(new FileMapping(static_cast<std::byte*>(memory), nbytes));
}

FileMapping::~FileMapping() { munmap(data_, nbytes_); }

}  // namespace tensorizer::io
