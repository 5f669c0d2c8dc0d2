#include "io/parallel_read.h"

#include <algorithm>

#include "core/checked_math.h"
#include "core/run_units.h"

namespace tensorizer::io {

void read_parallel(RangeSource& source, uint64_t offset, Slice into, const std::stop_token& stop) {
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
