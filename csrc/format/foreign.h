// What a file that is neither .tensors nor safetensors seems to be, for error messages. Pure.
#pragma once

#include <cstddef>
#include <span>
#include <string_view>

namespace tensorizer::format {

// What the first bytes of a file look like and what to do about it, as the end of a sentence;
// empty where they look like nothing known. Any number of bytes will do.
std::string_view foreign_format(std::span<const std::byte> head) noexcept;

}  // namespace tensorizer::format
