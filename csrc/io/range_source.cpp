#include "io/range_source.h"

#include <algorithm>

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

uint64_t RangeSource::read_up_to(uint64_t offset, Slice into, const std::stop_token& stop) {
  const auto end = size();
  if (!end) throw Error(Errc::io, name() + ": its size is unknown", name());
  if (offset >= *end) return 0;
  into = into.first(static_cast<size_t>(std::min<uint64_t>(into.size(), *end - offset)));
  read_at(offset, into, stop);
  return into.size();
}

}  // namespace tensorizer::io
