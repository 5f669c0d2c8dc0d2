// Parts of tensors: one plan and one load for many of them.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bind/bindings.h"
#include "bind/gil.h"
#include "bind/slice_index.h"
#include "bind/torch_bridge.h"
#include "core/error.h"
#include "core/run_units.h"
#include "load/allocate.h"
#include "load/open_index.h"
#include "load/slice_session.h"

namespace tensorizer::bind {
namespace {

using load::OpenedIndex;

// A load of parts of tensors. First their sizes are known; then memory is given to them, or
// allocated; then it runs.
class SliceBatch {
 public:
  SliceBatch(std::shared_ptr<io::RangeSource> source, std::shared_ptr<OpenedIndex> opened,
             const std::vector<uint32_t>& entries, const py::list& indices)
      : source_(std::move(source)), opened_(std::move(opened)) {
    if (entries.size() != indices.size())
      throw Error(Errc::invalid_argument, "one index per entry is wanted");
    targets_.reserve(entries.size());
    shapes_.reserve(entries.size());
    for (size_t i = 0; i < entries.size(); ++i) {
      if (entries[i] >= opened_->index.size()) throw py::index_error("no such entry");
      const format::IndexEntry& entry = opened_->index[entries[i]];
      SliceIndex part = parse_slice_index(indices[i], entry.shape);
      targets_.push_back(
          {.entry = entries[i], .runs = load::runs_of(entry.shape, entry.itemsize, part.box)});
      shapes_.push_back(std::move(part.result_shape));
    }
  }

  size_t size() const { return targets_.size(); }

  py::tuple shape(size_t i) const {
    py::tuple dims(shapes_.at(i).size());
    for (size_t d = 0; d < dims.size(); ++d) dims[d] = py::int_(shapes_[i][d]);
    return dims;
  }

  uint64_t nbytes(size_t i) const { return targets_.at(i).runs.nbytes(); }

  // Where the parts go; nullopt: to host memory that the batch allocates.
  void plan(const std::optional<std::vector<uint64_t>>& addresses,
            std::shared_ptr<device::CopyEngine> engine, std::shared_ptr<load::KeyRing> keys,
            unsigned max_workers, std::optional<uint64_t> gap_nbytes) {
    if (addresses && addresses->size() != targets_.size())
      throw Error(Errc::invalid_argument, "one address per part is wanted");
    if (addresses) {
      for (size_t i = 0; i < targets_.size(); ++i)
        targets_[i].destination = {reinterpret_cast<std::byte*>((*addresses)[i]), nbytes(i),
                                   nullptr};
    } else {
      std::vector<uint64_t> sizes;
      sizes.reserve(targets_.size());
      for (const load::SliceTarget& target : targets_) sizes.push_back(target.runs.nbytes());
      const auto memory = load::allocate_parts(*opened_, sizes);
      for (size_t i = 0; i < targets_.size(); ++i) targets_[i].destination = memory[i];
    }
    keys_ = std::move(keys);
    engine_ = std::move(engine);
    if (engine_) engine_->order_after_caller();
    const load::SliceOptions options{
        .load = {.max_workers = max_workers, .keys = keys_.get(), .engine = engine_.get()},
        .gap_nbytes = gap_nbytes};
    session_ = std::make_unique<load::SliceSession>(*source_, opened_, targets_, options);
  }

  void run() {
    load::SliceSession& planned = session();
    run_interruptible(planned.is_brief() ? Where::here : Where::helper_thread,
                      [&](const std::stop_token& stop) { planned.run(stop); });
  }

  // Runs several loads, at most `at_once` of them at a time; the first failure stops the others.
  static void run_all(const std::vector<SliceBatch*>& batches, unsigned at_once) {
    run_interruptible([&](const std::stop_token& stop) {
      for_each_index(batches.size(), at_once, stop, [&](size_t i, const std::stop_token& token) {
        batches[i]->session().run(token);
      });
    });
  }

  py::list tensors(TensorFactory& factory) {
    py::list result(targets_.size());
    for (size_t i = 0; i < targets_.size(); ++i) {
      const load::SliceTarget& target = targets_[i];
      const TensorDtype& dtype = factory.dtype(opened_->index[target.entry].dtype);
      result[i] = factory.tensor(dtype, shapes_[i], target.destination, TensorPlace::cpu());
    }
    return result;
  }

 private:
  load::SliceSession& session() const {
    if (!session_) throw Error(Errc::invalid_argument, "the parts have no plan yet");
    return *session_;
  }

  std::shared_ptr<io::RangeSource> source_;
  std::shared_ptr<OpenedIndex> opened_;
  std::vector<load::SliceTarget> targets_;
  std::vector<std::vector<uint64_t>> shapes_;
  std::shared_ptr<load::KeyRing> keys_;
  std::shared_ptr<device::CopyEngine> engine_;
  std::unique_ptr<load::SliceSession> session_;
};

}  // namespace

void register_slices(py::module_& m) {
  py::class_<SliceBatch>(m, "SliceBatch")
      .def(py::init<std::shared_ptr<io::RangeSource>, std::shared_ptr<OpenedIndex>,
                    const std::vector<uint32_t>&, const py::list&>(),
           py::arg("source"), py::arg("index"), py::arg("entries"), py::arg("indices"))
      .def("__len__", &SliceBatch::size)
      .def("shape", &SliceBatch::shape, py::arg("i"))
      .def("nbytes", &SliceBatch::nbytes, py::arg("i"))
      .def("plan", &SliceBatch::plan, py::kw_only(), py::arg("addresses") = py::none(),
           py::arg("engine") = py::none(), py::arg("keys") = py::none(), py::arg("max_workers") = 0,
           py::arg("gap_nbytes") = py::none())
      .def("run", &SliceBatch::run)
      .def("tensors", &SliceBatch::tensors, py::arg("factory"));
  m.def("run_slices", &SliceBatch::run_all, py::arg("batches"), py::arg("at_once"));
}

}  // namespace tensorizer::bind
