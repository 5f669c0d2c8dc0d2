// Loading: a batch of tensors, or of parts of them, per load.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>

#include "bind/bindings.h"
#include "bind/gil.h"
#include "bind/slice_index.h"
#include "bind/torch_bridge.h"
#include "core/error.h"
#include "format/tensor_path.h"
#include "io/local/file_mapping.h"
#include "load/allocate.h"
#include "load/concurrent_loads.h"
#include "load/load_session.h"

namespace tensorizer::bind {
namespace {

using load::LoadedHeaders;
using load::LoadTarget;
using load::OpenedIndex;

constexpr uint64_t kDeviceAlignment = 512;  // as torch's own allocator gives

// One load of selected tensors into memory that belongs to the batch until tensors are made over
// it. Of parts, first the shapes are known; then plan() gives them memory; then the load runs.
class LoadBatch {
 public:
  LoadBatch(std::shared_ptr<io::RangeSource> source, std::shared_ptr<OpenedIndex> opened,
            const std::vector<uint32_t>& selection, bool verify, unsigned max_workers,
            std::shared_ptr<load::KeyRing> keys, const std::shared_ptr<io::FileMapping>& mapping,
            const std::optional<py::function>& allocate,
            const std::optional<std::vector<uint64_t>>& addresses,
            std::shared_ptr<device::CopyEngine> engine, bool headers_only, uint64_t request_nbytes)
      : source_(std::move(source)),
        opened_(std::move(opened)),
        place_(allocate ? TensorPlace((*allocate)(0, false)) : TensorPlace::cpu()) {
    targets_.reserve(selection.size());
    for (uint32_t i : selection) {
      if (i >= opened_->index.size()) throw py::index_error("no such entry");
      if (!targets_.empty() && i <= targets_.back().entry)
        throw Error(Errc::invalid_argument, "entries must be given in file order");
      targets_.push_back({.entry = i});
    }
    if (mapping) map_in_place(mapping);
    if (headers_only) {
      for (LoadTarget& target : targets_) target.in_place = true;
    }
    if (addresses) check_stored_sizes();
    load::LoadOptions options{
        .verify = verify, .max_workers = max_workers, .request_nbytes = request_nbytes};
    if (engine && allocate && !addresses && !headers_only) {
      start(std::move(keys), std::move(engine), options);
      give_memory_later(memory_of(*allocate));
    } else {
      give_memory(addresses,
                  allocate ? memory_of(*allocate) : load::host_memory(*opened_, *source_));
      start(std::move(keys), std::move(engine), options);
    }
  }

  // Parts of tensors: one index per entry, as in tensor[...].
  static std::unique_ptr<LoadBatch> of_parts(std::shared_ptr<io::RangeSource> source,
                                             std::shared_ptr<OpenedIndex> opened,
                                             const std::vector<uint32_t>& entries,
                                             const py::list& indices) {
    return std::unique_ptr<LoadBatch>(
        new LoadBatch(std::move(source), std::move(opened), entries, indices));
  }

  size_t size() const { return targets_.size(); }
  py::tuple part_shape(size_t i) const { return shape_tuple(shapes_.at(i)); }
  uint64_t part_nbytes(size_t i) const { return targets_.at(i).runs.nbytes(); }

  // Where the parts go; nullopt: to host memory that the batch allocates.
  void plan(const std::optional<std::vector<uint64_t>>& addresses,
            std::shared_ptr<device::CopyEngine> engine, std::shared_ptr<load::KeyRing> keys,
            unsigned max_workers, std::optional<uint64_t> gap_nbytes) {
    if (session_) throw Error(Errc::invalid_argument, "the batch has a plan already");
    give_memory(addresses, load::host_memory(*opened_, *source_));
    start(std::move(keys), std::move(engine),
          {.max_workers = max_workers, .parts = true, .gap_nbytes = gap_nbytes});
  }

  void run(const py::object& progress) { run_together({this}, 1, progress); }

  // Runs several loads, of those that do not share their workers at most `at_once` at a time; the
  // first failure stops the others.
  static void run_together(const std::vector<LoadBatch*>& batches, unsigned at_once,
                           const py::object& progress) {
    std::vector<load::LoadSession*> sessions;
    for (const LoadBatch* batch : batches) sessions.push_back(&batch->session());
    // Memory is allocated by Python, on the thread that waits.
    const auto on_caller = [](const std::function<void()>& work) {
      on_calling_thread([&work] { call_python(work); });
    };
    run_interruptible(
        batches.size() == 1 && batches.front()->is_brief() ? Where::here : Where::helper_thread,
        [&](const std::stop_token& stop) { load::run_loads(sessions, at_once, on_caller, stop); },
        report_to(progress, [&] {
          uint64_t done = 0;
          for (const load::LoadSession* session : sessions)
            done += session->nbytes_done.load(std::memory_order_relaxed);
          return done;
        }));
  }

  std::shared_ptr<const LoadedHeaders> headers() const { return session().headers; }

  py::list parameters(TensorFactory& factory) {
    return make_tensors(factory, [&](const TensorDtype& dtype, py::object tensor) {
      return factory.parameter(std::move(tensor), dtype);
    });
  }

  py::list tensors(TensorFactory& factory) {
    return make_tensors(factory, [](const TensorDtype&, py::object tensor) { return tensor; });
  }

 private:
  LoadBatch(std::shared_ptr<io::RangeSource> source, std::shared_ptr<OpenedIndex> opened,
            const std::vector<uint32_t>& entries, const py::list& indices)
      : source_(std::move(source)), opened_(std::move(opened)), place_(TensorPlace::cpu()) {
    if (entries.size() != indices.size())
      throw Error(Errc::invalid_argument, "one index per entry is expected");
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
    is_of_parts_ = true;
  }

  bool is_brief() const { return session().is_brief && (!engine_ || engine_->is_ready()); }

  load::LoadSession& session() const {
    if (!session_) throw Error(Errc::invalid_argument, "the parts have no plan yet");
    return *session_;
  }

  void give_memory(const std::optional<std::vector<uint64_t>>& addresses,
                   const load::MemoryMaker& memory) {
    if (!addresses) {
      for (const load::MemoryGroup& group : group_memory(memory))
        load::allocate(group, *opened_, *source_, memory, targets_);
      return;
    }
    if (addresses->size() != targets_.size())
      throw Error(Errc::invalid_argument, "one address per tensor is expected");
    for (size_t i = 0; i < targets_.size(); ++i) {
      const uint64_t nbytes =
          is_of_parts_ ? part_nbytes(i) : opened_->index[targets_[i].entry].data_nbytes;
      targets_[i].destination = {reinterpret_cast<std::byte*>((*addresses)[i]), nbytes, nullptr};
    }
  }

  std::vector<load::MemoryGroup> group_memory(const load::MemoryMaker& memory) const {
    return load::group_memory(*opened_, is_of_parts_, memory, targets_);
  }

  // Memory of a device, while the load runs; a load of a few milliseconds has it before.
  void give_memory_later(load::MemoryMaker memory) {
    std::vector<load::MemoryGroup> groups = group_memory(memory);
    session_->allocate_while_it_runs(std::move(groups), std::move(memory));
    if (!session_->is_brief) return;
    session_->allocate_now();
    engine_->order_after_caller();
  }

  void start(std::shared_ptr<load::KeyRing> keys, std::shared_ptr<device::CopyEngine> engine,
             load::LoadOptions options) {
    keys_ = std::move(keys);
    engine_ = std::move(engine);
    if (engine_) engine_->order_after_caller();
    options.keys = keys_.get();
    options.engine = engine_.get();
    session_ = std::make_unique<load::LoadSession>(*source_, opened_, targets_, options);
  }

  template <class Finish>
  py::list make_tensors(TensorFactory& factory, Finish&& finish) {
    const LoadedHeaders& headers = *session().headers;
    py::list result(targets_.size());
    for (size_t i = 0; i < targets_.size(); ++i) {
      const TensorDtype& dtype =
          factory.dtype(is_of_parts_ ? std::string_view(opened_->index[targets_[i].entry].dtype)
                                     : headers.dtype(i));
      const std::span<const uint64_t> shape =
          is_of_parts_ ? std::span<const uint64_t>(shapes_[i]) : headers.shape(i);
      result[i] =
          finish(dtype, factory.tensor(dtype, shape, session().targets[i].destination, place_));
    }
    return result;
  }

  // allocate(nbytes, zeros) -> flat torch tensor
  static load::MemoryMaker memory_of(const py::function& allocate) {
    const auto make = [allocate](uint64_t nbytes, bool zeros) -> device::TensorMemory {
      py::object tensor = allocate(nbytes, zeros);
      const auto address = tensor.attr("data_ptr")().cast<uintptr_t>();
      return {reinterpret_cast<std::byte*>(address), nbytes, keep_alive(std::move(tensor))};
    };
    return {make, kDeviceAlignment};
  }

  // Memory of the caller has exactly the size that a tensor takes.
  void check_stored_sizes() const {
    for (const LoadTarget& target : targets_) {
      const format::IndexEntry& entry = opened_->index[target.entry];
      if (entry.data_nbytes != entry.loaded_nbytes)
        throw Error(Errc::malformed, "tensor " + format::display_name(entry.name) + " stores " +
                                         std::to_string(entry.data_nbytes) + " bytes, expected " +
                                         std::to_string(entry.loaded_nbytes));
    }
  }

  // Tensors whose payload is aligned for their element become views of the mapping; the others are
  // copied.
  void map_in_place(const std::shared_ptr<io::FileMapping>& mapping) {
    if (opened_->prologue.has_crypt_info())
      throw Error(Errc::invalid_argument, "mmap=True: encrypted tensors cannot be mapped");
    for (LoadTarget& target : targets_) {
      const format::IndexEntry& entry = opened_->index[target.entry];
      if (entry.data_nbytes == 0 || entry.data_offset % std::max(entry.itemsize, 1U) != 0) continue;
      target.in_place = true;
      target.destination = {mapping->bytes().data() + entry.data_offset, entry.data_nbytes,
                            mapping};
    }
  }

  std::shared_ptr<io::RangeSource> source_;
  std::shared_ptr<OpenedIndex> opened_;
  std::vector<LoadTarget> targets_;
  std::vector<std::vector<uint64_t>> shapes_;  // of parts
  bool is_of_parts_ = false;
  std::shared_ptr<load::KeyRing> keys_;
  std::shared_ptr<device::CopyEngine> engine_;
  const TensorPlace place_;
  std::unique_ptr<load::LoadSession> session_;
};

// (hash type, value) of one record, as stored.
py::list stored_hashes(const LoadedHeaders& headers, size_t i) {
  py::list result;
  for (const format::StoredHash& hash : headers.header(i).hashes) {
    result.append(py::make_tuple(static_cast<int>(hash.type), to_bytes(hash.value)));
  }
  return result;
}

// Whether bytes elsewhere are those the record was written with.
bool matches(const LoadedHeaders& headers, size_t i, uint64_t address, uint64_t nbytes) {
  const std::span<const std::byte> data(reinterpret_cast<const std::byte*>(address), nbytes);
  return run_interruptible([&](const std::stop_token&) { return headers.matches(i, data); });
}

}  // namespace

void register_batch(py::module_& m) {
  py::class_<LoadedHeaders, std::shared_ptr<LoadedHeaders>>(m, "LoadedHeaders")
      .def("dtype", [](const LoadedHeaders& h, size_t i) { return to_bytes(h.dtype(i)); })
      .def("shape", [](const LoadedHeaders& h, size_t i) { return shape_tuple(h.shape(i)); })
      .def("module_idx", [](const LoadedHeaders& h, size_t i) { return h.header(i).module_idx; })
      .def("hashes", &stored_hashes)
      .def("matches", &matches, py::arg("i"), py::arg("address"), py::arg("nbytes"));
  py::class_<LoadBatch>(m, "LoadBatch")
      .def(py::init<std::shared_ptr<io::RangeSource>, std::shared_ptr<OpenedIndex>,
                    const std::vector<uint32_t>&, bool, unsigned, std::shared_ptr<load::KeyRing>,
                    std::shared_ptr<io::FileMapping>, const std::optional<py::function>&,
                    const std::optional<std::vector<uint64_t>>&,
                    std::shared_ptr<device::CopyEngine>, bool, uint64_t>(),
           py::arg("source"), py::arg("index"), py::arg("selection"), py::kw_only(),
           py::arg("verify") = false, py::arg("max_workers") = 0, py::arg("keys") = py::none(),
           py::arg("mapping") = py::none(), py::arg("allocate") = py::none(),
           py::arg("addresses") = py::none(), py::arg("engine") = py::none(),
           py::arg("headers_only") = false, py::arg("request_nbytes") = 0)
      .def("run", &LoadBatch::run, py::arg("progress") = py::none())
      .def_property_readonly("headers",
                             [](const LoadBatch& batch) {
                               return std::const_pointer_cast<LoadedHeaders>(batch.headers());
                             })
      .def_static("of_parts", &LoadBatch::of_parts, py::arg("source"), py::arg("index"),
                  py::arg("entries"), py::arg("indices"))
      .def("__len__", &LoadBatch::size)
      .def("part_shape", &LoadBatch::part_shape, py::arg("i"))
      .def("part_nbytes", &LoadBatch::part_nbytes, py::arg("i"))
      .def("plan", &LoadBatch::plan, py::kw_only(), py::arg("addresses") = py::none(),
           py::arg("engine") = py::none(), py::arg("keys") = py::none(), py::arg("max_workers") = 0,
           py::arg("gap_nbytes") = py::none())
      .def("parameters", &LoadBatch::parameters, py::arg("factory"))
      .def("tensors", &LoadBatch::tensors, py::arg("factory"));
  m.def("run_batches", &LoadBatch::run_together, py::arg("batches"), py::arg("at_once"),
        py::arg("progress") = py::none());
  py::class_<TensorFactory>(m, "TensorFactory").def(py::init<py::function>(), py::arg("resolve"));
}

}  // namespace tensorizer::bind
