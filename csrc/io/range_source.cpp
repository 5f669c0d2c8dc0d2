#include "io/range_source.h"

#include <algorithm>

#include "core/checked_math.h"
#include "core/run_units.h"

namespace tensorizer::io {

void throw_truncated(const std::string& name, uint64_t offset, uint64_t nbytes,
                     uint64_t source_nbytes) {
  throw Error(Errc::truncated,
              name + " is cut short: it ends at byte " + std::to_string(source_nbytes) +
                  ", but bytes " + std::to_string(offset) + " to " +
                  std::to_string(offset + nbytes) + " are expected",
              name, offset);
}

uint64_t RangeSource::read_up_to(uint64_t offset, Buffer into, const std::stop_token& stop) {
  const auto end = size();
  if (!end) throw Error(Errc::io, name() + ": its size is unknown", name());
  if (offset >= *end) return 0;
  into = into.first(static_cast<size_t>(std::min<uint64_t>(into.size(), *end - offset)));
  read_at(offset, into, stop);
  return into.size();
}

void drop_damaged_copy(RangeSource& source, const Error& error) {
  if (!source.drop_copy()) return;
  Error longer(error.code(), std::string(error.what()) + "; the cached copy was removed; try again",
               error.source, error.offset);
  longer.version = error.version;
  throw longer;
}

void read_parallel(RangeSource& source, uint64_t offset, Buffer into, const std::stop_token& stop) {
  source.begin_load(into.size(), stop);
  const SourceTraits traits = source.traits();
  const uint64_t unit = std::max<uint64_t>(1, traits.unit_nbytes);
  const uint64_t units = ceil_div(into.size(), unit);
  const uint64_t workers = traits.sequential ? 1 : std::min<uint64_t>(traits.concurrency, units);
  if (workers <= 1) return source.read_at(offset, into, stop);
  const auto read_unit = [&](size_t k, const std::stop_token& stop_all) {
    const uint64_t begin = k * unit;
    const uint64_t nbytes = std::min<uint64_t>(unit, into.size() - begin);
    source.read_at(offset + begin, into.subspan(begin, nbytes), stop_all);
  };
  for_each_index(units, static_cast<unsigned>(workers), stop, read_unit);
}

}  // namespace tensorizer::io
