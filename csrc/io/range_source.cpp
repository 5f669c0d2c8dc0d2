#include "io/range_source.h"

#include "core/error.h"

namespace tensorizer::io {

void throw_truncated(const std::string& name, uint64_t offset, uint64_t nbytes,
                     uint64_t source_nbytes) {
  throw Error(Errc::truncated,
              name + " is cut short: it ends at byte " + std::to_string(source_nbytes) +
                  ", but bytes " + std::to_string(offset) + " to " +
                  std::to_string(offset + nbytes) + " are wanted",
              name, offset);
}

}  // namespace tensorizer::io
