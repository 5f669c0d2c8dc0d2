#include "io/local/file_mapping.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>

#include "core/checked_math.h"
#include "core/error.h"
#include "core/pages.h"
#include "core/run_units.h"
#include "core/threads.h"

namespace tensorizer::io {
namespace {

constexpr uint64_t kPopulatedNbytes = uint64_t{8} << 20;  // at a time; a stop ends it in between
constexpr int kPopulateRead = 22;  // MADV_POPULATE_READ, which older headers lack

}  // namespace

std::shared_ptr<FileMapping> FileMapping::create(int fd, uint64_t nbytes, const std::string& name) {
  void* memory = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, fd, 0);
  if (memory == MAP_FAILED) throw_errno("cannot map", name, errno);
  return std::shared_ptr<FileMapping>(new FileMapping(static_cast<std::byte*>(memory), nbytes));
}

void FileMapping::populate(uint64_t offset, uint64_t nbytes, const std::stop_token& stop) const {
  if (offset >= nbytes_ || nbytes == 0) return;
  const uint64_t begin = align_down(offset, kPageNbytes);
  const uint64_t end = std::min(offset + std::min(nbytes, nbytes_ - offset), nbytes_);
  const uint64_t stretches = ceil_div(end - begin, kPopulatedNbytes);
  for_each_index(stretches, cpu_quota(), stop, [&](size_t i, const std::stop_token& token) {
    throw_if_stopped(token);
    const uint64_t from = begin + i * kPopulatedNbytes;
    madvise(data_ + from, std::min(kPopulatedNbytes, end - from), kPopulateRead);
  });
}

FileMapping::~FileMapping() { munmap(data_, nbytes_); }

}  // namespace tensorizer::io
