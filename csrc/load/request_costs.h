// What reads cost beside the bytes they bring: sizes on which plans and sessions agree.
#pragma once

#include <cstdint>

namespace tensorizer::load {

// As much is read from memory sooner than another thread wakes up.
inline constexpr uint64_t kBriefNbytes = uint64_t{1} << 20;

// A source whose requests cost less than this many bytes is asked for no more than is needed, and
// is read chunk by chunk when decrypting.
inline constexpr uint64_t kCheapRequestNbytes = uint64_t{64} << 10;

}  // namespace tensorizer::load
