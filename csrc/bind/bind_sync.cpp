// What changed in tensors, their sums, and writing it over others. Tensors come as (address,
// bytes).
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bind/bindings.h"
#include "bind/gil.h"
#include "core/threads.h"
#include "sync/delta.h"
#include "sync/element_sum.h"

namespace tensorizer::bind {
namespace {

using sync::CheckedDelta;
using sync::Delta;

using Memory = std::pair<uint64_t, uint64_t>;  // address and bytes

constexpr uint64_t kShortNbytes = uint64_t{1} << 20;  // looked through in less than a millisecond

std::span<std::byte> span_of(const Memory& memory) {
  return {reinterpret_cast<std::byte*>(memory.first), memory.second};
}
Memory memory_of(const sync::UnwrittenBytes& bytes) {
  return {reinterpret_cast<uint64_t>(bytes.data()), bytes.size()};
}

Where place_of_work(uint64_t nbytes) {
  return nbytes <= kShortNbytes ? Where::here : Where::helper_thread;
}

// (tensor before, the same now, bytes of an element).
using CopiesOfTensor = std::tuple<Memory, Memory, size_t>;

// (elements that changed, change of the sum, delta; None where the whole tensor is fewer bytes).
using FoundDifference = std::tuple<uint64_t, uint64_t, std::shared_ptr<Delta>>;

std::vector<FoundDifference> take_differences(const std::vector<CopiesOfTensor>& tensors) {
  std::vector<sync::Copies> copies;
  copies.reserve(tensors.size());
  uint64_t nbytes = 0;
  for (const auto& [before, after, itemsize] : tensors) {
    copies.push_back({{span_of(before), itemsize}, span_of(after)});
    nbytes += before.second;
  }
  std::vector<sync::Difference> found =
      run_interruptible(place_of_work(nbytes), [&](const std::stop_token& stop) {
        return sync::take_differences(copies, cpu_quota(), stop);
      });
  std::vector<FoundDifference> result;
  result.reserve(found.size());
  for (sync::Difference& one : found)
    result.emplace_back(one.changed, one.sum_change,
                        one.delta ? std::make_shared<Delta>(std::move(*one.delta)) : nullptr);
  return result;
}

// (tensor or a part of it, bytes of an element, number of the first element).
std::vector<uint64_t> element_sums(const std::vector<std::tuple<Memory, size_t, uint64_t>>& parts) {
  std::vector<sync::Elements> tensors;
  tensors.reserve(parts.size());
  uint64_t nbytes = 0;
  for (const auto& [memory, itemsize, first] : parts) {
    tensors.push_back({span_of(memory), itemsize, first});
    nbytes += memory.second;
  }
  return run_interruptible(place_of_work(nbytes), [&](const std::stop_token& stop) {
    return sync::element_sums(tensors, cpu_quota(), stop);
  });
}

std::shared_ptr<CheckedDelta> check(const Memory& positions, const Memory& values, uint64_t count,
                                    size_t itemsize, const std::string& tensor) {
  return run_interruptible(place_of_work(positions.second + values.second),
                           [&](const std::stop_token& stop) {
                             const sync::StoredDelta stored{
                                 .positions = span_of(positions),
                                 .values = span_of(values),
                                 .count = count,
                                 .itemsize = itemsize,
                                 .tensor = tensor,
                             };
                             return std::make_shared<CheckedDelta>(stored, cpu_quota(), stop);
                           });
}

std::shared_ptr<Delta> merge(const std::vector<std::shared_ptr<CheckedDelta>>& deltas) {
  std::vector<const CheckedDelta*> parts;
  uint64_t nbytes = 0;
  for (const auto& delta : deltas) {
    parts.push_back(delta.get());
    nbytes += delta->positions().size() + delta->values().size();
  }
  return run_interruptible(place_of_work(nbytes), [&](const std::stop_token& stop) {
    return std::make_shared<Delta>(sync::merged(parts, cpu_quota(), stop));
  });
}

// (tensor, the delta for it).
using ChangeOfTensor = std::pair<Memory, std::shared_ptr<CheckedDelta>>;

template <class Work>
auto work_on(const std::vector<ChangeOfTensor>& tensors, const Work& work) {
  std::vector<sync::Change> changes;
  changes.reserve(tensors.size());
  uint64_t nbytes = 0;
  for (const auto& [memory, delta] : tensors) {
    if (memory.second != delta->count() * delta->itemsize())
      throw Error(Errc::invalid_argument, "the delta is for a tensor of another size");
    changes.push_back({{span_of(memory), delta->itemsize()}, delta.get()});
    nbytes += delta->positions().size() + delta->values().size();
  }
  return run_interruptible(place_of_work(nbytes), [&](const std::stop_token& stop) {
    return work(changes, cpu_quota(), stop);
  });
}

// Numbers of int64 for the positions from `first` on.
void decode(const CheckedDelta& delta, uint64_t first, const Memory& numbers) {
  sync::decode(delta, first,
               {reinterpret_cast<int64_t*>(numbers.first), numbers.second / sizeof(int64_t)});
}

void copy_values(const CheckedDelta& delta, uint64_t first, const Memory& values) {
  const sync::Bytes all = delta.values();
  const uint64_t begin = first * delta.itemsize();
  if (begin > all.size() || values.second > all.size() - begin)
    throw Error(Errc::invalid_argument, "the delta has no such values");
  std::memcpy(span_of(values).data(), all.data() + begin, values.second);
}

uint64_t sum_of(const Memory& numbers, const Memory& values, size_t itemsize) {
  return sync::sum_of(
      {reinterpret_cast<const int64_t*>(numbers.first), numbers.second / sizeof(int64_t)},
      span_of(values), itemsize);
}

}  // namespace

void register_sync(py::module_& m) {
  using Unlocked = py::call_guard<InterpreterUnlock>;
  py::class_<Delta, std::shared_ptr<Delta>>(m, "Delta")
      .def_property_readonly("positions", [](const Delta& d) { return memory_of(d.positions); })
      .def_property_readonly("values", [](const Delta& d) { return memory_of(d.values); });
  py::class_<CheckedDelta, std::shared_ptr<CheckedDelta>>(m, "CheckedDelta")
      .def(py::init(&check), py::arg("positions"), py::arg("values"), py::arg("count"),
           py::arg("itemsize"), py::arg("tensor"))
      .def_property_readonly("changed", &CheckedDelta::changed)
      .def_property_readonly("sum_of_values", &CheckedDelta::sum_of_values)
      .def("copy_values", &copy_values, py::arg("first"), py::arg("values"), Unlocked())
      .def("decode", &decode, py::arg("first"), py::arg("numbers"), Unlocked());
  m.def("take_differences", &take_differences, py::arg("tensors"));
  m.def("element_sums", &element_sums, py::arg("tensors"));
  m.def("merge_deltas", &merge, py::arg("deltas"));
  m.def(
      "sum_changes",
      [](const std::vector<ChangeOfTensor>& tensors) {
        return work_on(tensors, sync::sum_changes);
      },
      py::arg("tensors"));
  m.def(
      "write_deltas",
      [](const std::vector<ChangeOfTensor>& tensors) { work_on(tensors, sync::write); },
      py::arg("tensors"));
  m.def("sum_of_elements", &sum_of, py::arg("numbers"), py::arg("values"), py::arg("itemsize"),
        Unlocked());
}

}  // namespace tensorizer::bind
