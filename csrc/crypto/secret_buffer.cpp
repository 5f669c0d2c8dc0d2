#include "crypto/secret_buffer.h"

#include <sys/mman.h>

#include <string>

#include "core/error.h"

namespace tensorizer::crypto {

SecretBuffer::SecretBuffer(size_t nbytes) {
  if (nbytes == 0) return;
  void* const memory =
      mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED)
    throw Error(Errc::out_of_memory,
                "no memory for a buffer of " + std::to_string(nbytes) + " bytes");
#if defined(MADV_DONTDUMP)
  madvise(memory, nbytes, MADV_DONTDUMP);
#endif
  bytes_ = {static_cast<std::byte*>(memory), nbytes};
}

SecretBuffer::~SecretBuffer() {
  if (!bytes_.empty()) munmap(bytes_.data(), bytes_.size());
}

}  // namespace tensorizer::crypto
