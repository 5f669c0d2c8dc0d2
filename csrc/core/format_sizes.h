// Sizes of the file format that csrc/format stores and csrc/crypto computes with. Source:
// docs/format.md, "crypt_info".
#pragma once

#include <cstddef>
#include <cstdint>

namespace tensorizer {

inline constexpr size_t kMacNbytes = 16;
inline constexpr size_t kNonceNbytes = 24;
inline constexpr size_t kSaltNbytes = 16;
// Plaintext of a chunk, as writers choose it; readers accept multiples of 64 from kMinChunkNbytes.
inline constexpr uint64_t kCipherChunkNbytes = uint64_t{2} << 20;
inline constexpr uint64_t kMinChunkNbytes = 1024;

}  // namespace tensorizer
