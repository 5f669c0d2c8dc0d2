// What becomes of a load whose source was written to meanwhile.
#pragma once

#include <stop_token>

#include "load/load_job.h"

namespace tensorizer::load {

// After the workers have ended. Throws Error (io; truncated where the source is shorter now) if the
// source is not as it was when it was opened.
//
// Two changes do no harm: records that a serializer appends, and a cut behind what was loaded. So a
// source of another size is let pass if its index begins as before, and if what was loaded is what
// the record headers, read again, have digests of; of a load that verified its bytes, the digests
// of both headers are compared. Tensors on a device cannot be compared, nor parts, nor those
// without digests: they are not let pass.
void check_unchanged(const LoadJob& job, const std::stop_token& stop);

// In the handler of an error that the bytes gave cause for: throws the same if the source was
// written to or cut meanwhile, which explains more.
void blame_change(const io::RangeSource& source);

// Likewise: removes the copy that some of the bytes came from, and throws the error with a word
// about that, if there was one.
void drop_damaged_copy(io::RangeSource& source, const Error& error);

}  // namespace tensorizer::load
