// Which container a source holds: told by its first bytes, never by its name. Pure.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace tensorizer::format {

enum class Container : uint8_t {
  tensors,      // |TZR|: prologue, index, records
  safetensors,  // a header length and JSON, then payloads
};

// Bytes that decide, and that say what a git-lfs pointer stands for.
inline constexpr uint64_t kContainerHeadNbytes = 512;

// `head` begins at `origin` of the source and holds kContainerHeadNbytes, or all there are. Throws
// Error: malformed (a git-lfs pointer, which the message describes), truncated (too short to be
// either). What is neither is said to be `tensors`: parsing its prologue says what is wrong.
Container detect_container(std::span<const std::byte> head, uint64_t origin);

}  // namespace tensorizer::format
