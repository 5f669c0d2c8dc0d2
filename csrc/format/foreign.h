// What a file that is no .tensors file seems to be instead, for error messages. Pure.
#pragma once

#include <cstddef>
#include <span>
#include <string>

namespace tensorizer::format {

// Bytes of the beginning that tell all there is to tell: a Git LFS pointer is a short text.
inline constexpr size_t kForeignHeadNbytes = 256;

// Whether the bytes begin a Git LFS pointer, whose oid and size stand behind the first 73 bytes.
bool begins_lfs_pointer(std::span<const std::byte> head) noexcept;

// What the first bytes of a file look like and what to do about it, as the end of a sentence;
// empty where they look like nothing known. Any number of bytes will do.
std::string foreign_format(std::span<const std::byte> head);

}  // namespace tensorizer::format
