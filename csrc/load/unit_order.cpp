#include "load/unit_order.h"

#include <algorithm>
#include <queue>

namespace tensorizer::load {
namespace {

// Units that keep their order, and how far it has come.
struct Stream {
  std::vector<NumberedUnit> units;
  size_t next = 0;
  double nbytes = 0;
  double done = 0;
};

}  // namespace

std::vector<NumberedUnit> order_units(std::span<const UnitsOfLoad> loads) {
  const auto unit_of = [&](const NumberedUnit& n) -> const Unit& {
    return loads[n.load].units[n.unit];
  };
  std::vector<Stream> streams;
  Stream waiting;
  size_t count = 0;
  std::vector<bool> taken(loads.size());
  for (uint32_t load = 0; load < loads.size(); ++load) {
    count += loads[load].units.size();
    if (taken[load]) continue;
    Stream own;
    Stream& stream = loads[load].remote ? waiting : own;
    const size_t begin = stream.units.size();
    // Loads of one source that waits are read as one.
    for (uint32_t same = load; same < (loads[load].remote ? loads.size() : load + 1); ++same) {
      if (!loads[same].remote && same != load) continue;
      if (loads[same].source != loads[load].source) continue;
      taken[same] = true;
      const size_t middle = stream.units.size();
      for (uint32_t unit = 0; unit < loads[same].units.size(); ++unit)
        stream.units.push_back({same, unit});
      if (middle == begin) continue;
      std::inplace_merge(stream.units.begin() + static_cast<ptrdiff_t>(begin),
                         stream.units.begin() + static_cast<ptrdiff_t>(middle), stream.units.end(),
                         [&](const NumberedUnit& a, const NumberedUnit& b) {
                           return unit_of(a).offset < unit_of(b).offset;
                         });
    }
    if (!loads[load].remote) streams.push_back(std::move(own));
  }
  streams.push_back(std::move(waiting));
  for (Stream& stream : streams)
    for (const NumberedUnit& unit : stream.units)
      stream.nbytes += static_cast<double>(unit_of(unit).nbytes);

  using Place = std::pair<double, size_t>;  // share that is done, stream
  std::priority_queue<Place, std::vector<Place>, std::greater<>> places;
  for (size_t i = 0; i < streams.size(); ++i)
    if (!streams[i].units.empty()) places.push({0, i});
  std::vector<NumberedUnit> order;
  order.reserve(count);
  while (!places.empty()) {
    const size_t i = places.top().second;
    places.pop();
    Stream& stream = streams[i];
    order.push_back(stream.units[stream.next]);
    stream.done += static_cast<double>(unit_of(stream.units[stream.next]).nbytes);
    if (++stream.next < stream.units.size()) places.push({stream.done / stream.nbytes, i});
  }
  return order;
}

}  // namespace tensorizer::load
