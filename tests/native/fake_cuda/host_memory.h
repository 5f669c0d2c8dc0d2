// Memory of the fake device: one stretch of bytes seen at two addresses, and only the driver's one
// is accessible.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>

#include "model.h"

namespace fake_cuda {

inline std::byte* map_host(uint64_t nbytes) {
  void* address =
      ::mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (address == MAP_FAILED) violation("the fake driver is out of memory");
  return static_cast<std::byte*>(address);
}

inline void unmap(std::byte* address, uint64_t nbytes) { ::munmap(address, nbytes); }

// Sets address (inaccessible) and bytes (accessible) of a block of device memory.
inline void map_device(Block& block, uint64_t nbytes) {
  const int fd = ::memfd_create("fake device memory", MFD_CLOEXEC);
  if (fd < 0 || ::ftruncate(fd, static_cast<off_t>(nbytes)) != 0)
    violation("the fake driver is out of memory");
  void* seen = ::mmap(nullptr, nbytes, PROT_NONE, MAP_SHARED, fd, 0);
  void* real = ::mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  ::close(fd);
  if (seen == MAP_FAILED || real == MAP_FAILED) violation("the fake driver is out of memory");
  block.address = static_cast<std::byte*>(seen);
  block.bytes = static_cast<std::byte*>(real);
  block.nbytes = nbytes;
}

}  // namespace fake_cuda
