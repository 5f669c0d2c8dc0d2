#include "core/wipe.h"

#include <string.h>

namespace tensorizer {

void wipe(void* memory, size_t nbytes) noexcept {
  if (nbytes > 0) ::explicit_bzero(memory, nbytes);
}

}  // namespace tensorizer
