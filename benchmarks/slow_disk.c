// Preloaded, makes large writes at an offset as slow as a disk of 80 MB/s, for the node cache's benchmark.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/uio.h>
#include <unistd.h>

enum { kLarge = 256 << 10, kBytesPerMicrosecond = 80 };

ssize_t pwritev64(int file, const struct iovec* parts, int count, off64_t offset) {
  ssize_t (*write_parts)(int, const struct iovec*, int, off64_t) = dlsym(RTLD_NEXT, "pwritev64");
  size_t nbytes = 0;
  for (int i = 0; i < count; ++i) nbytes += parts[i].iov_len;
  if (nbytes >= kLarge) usleep(nbytes / kBytesPerMicrosecond);
  return write_parts(file, parts, count, offset);
}
