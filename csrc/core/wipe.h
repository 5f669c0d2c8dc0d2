// The one way to overwrite secrets.
#pragma once

#include <cstddef>

namespace tensorizer {

// Makes the bytes zero, in a way that no compiler leaves out. Not inline, because files that are
// compiled for newer processors call it, too.
void wipe(void* memory, size_t nbytes) noexcept;

}  // namespace tensorizer
