// On what a file lies, what that can do, and another descriptor for it.
#pragma once

#include <string>

#include "core/unique_fd.h"

namespace tensorizer::io {

// The name of a file system that other machines, or a program (FUSE), write to as well; nullptr: it
// is of this machine, or of a kind that is not listed here. If the system does not tell, it is
// "unknown".
const char* network_file_system(int fd) noexcept;

// Whether its files are in memory, where reserving room takes as long as writing.
bool is_in_memory(int fd) noexcept;

// Whether a file system is mounted at `path` itself, over the file that was there: no other file
// can take its name. False where the system does not say.
bool is_mount_point(const std::string& path) noexcept;

// What can be done with new files in a folder.
struct FolderTraits {
  bool renames = true;    // one that is complete can take the name of another
  bool any_order = true;  // bytes are taken in any order; else, only from front to back
};

// Looks at the file system, and tries it once for each device of a kind that is not listed, by a
// hidden file that is gone on return. All true where no file can be made: that says what is wrong.
FolderTraits folder_traits(const std::string& folder);

// Whether an errno of link() or rename() says that a name cannot be given here, and no more than
// that.
bool gives_no_names(int err) noexcept;

// The same file, opened once more for reading: a duplicate would share its flags and its read-ahead
// with `fd`. Empty where the system does not allow it, or has no /proc.
UniqueFd open_again(int fd, int flags);

}  // namespace tensorizer::io
