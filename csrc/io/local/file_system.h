// On what a file lies, and another descriptor for it.
#pragma once

#include "core/unique_fd.h"

namespace tensorizer::io {

// The name of a file system that other machines, or a program (FUSE), write to as well; nullptr: it
// is of this machine, or of a kind that nobody knows. Where nothing can be learned it is "unknown".
const char* network_file_system(int fd) noexcept;

// Whether its files are in memory, where reserving room takes as long as writing.
bool is_in_memory(int fd) noexcept;

// The same file, opened once more for reading: a duplicate would share its flags and its read-ahead
// with `fd`. Empty where the system does not allow it, or has no /proc.
UniqueFd open_again(int fd, int flags);

}  // namespace tensorizer::io
