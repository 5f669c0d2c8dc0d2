// How much one worker takes at once when payloads are written or copied.
#pragma once

#include <cstdint>

namespace tensorizer::save {

inline constexpr uint64_t kUnitNbytes = uint64_t{8} << 20;  // a multiple of the cipher chunk

}  // namespace tensorizer::save
