// Opening and loading: the index as columns, a batch of tensors per load.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <atomic>
#include <set>
#include <stop_token>

#include "bind/bindings.h"
#include "bind/gil.h"
#include "bind/names.h"
#include "bind/torch_bridge.h"
#include "core/checked_math.h"
#include "core/error.h"
#include "core/run_units.h"
#include "core/stop.h"
#include "core/task_group.h"
#include "device/kept_memory.h"
#include "format/shard_index.h"
#include "io/local/file_mapping.h"
#include "load/allocate.h"
#include "load/load_session.h"
#include "load/open_index.h"
#include "load/sealed_metadata.h"

namespace tensorizer::bind {
namespace {

using load::LoadedHeaders;
using load::LoadTarget;
using load::OpenedIndex;

constexpr uint64_t kBriefIndexNbytes = uint64_t{1} << 20;  // parsed in a few milliseconds
constexpr uint64_t kDeviceAlignment = 512;                 // as torch's own allocator gives

// The entry of a name's own; of the target where a tie alone gives the name.
const format::IndexEntry& entry_at(const OpenedIndex& opened, size_t i) {
  if (i < opened.index.size()) return opened.index[i];
  if (i >= opened.name_count()) throw py::index_error("no such entry");
  return opened.index[opened.target(i)];
}

py::object shown_name(const OpenedIndex& opened, std::string_view name) {
  return opened.container == format::Container::tensors ? name_to_python(name)
                                                        : text_to_python(name);
}

py::list names(const OpenedIndex& opened) {
  py::list result(opened.name_count());
  for (size_t i = 0; i < opened.name_count(); ++i) result[i] = shown_name(opened, opened.name(i));
  return result;
}

// (alias, target, whether the file holds the alias's data too)
py::list ties(const OpenedIndex& opened) {
  py::list result;
  for (const format::Tie& tie : opened.ties) {
    result.append(py::make_tuple(shown_name(opened, tie.alias),
                                 shown_name(opened, opened.index[tie.target].name),
                                 tie.listed.has_value()));
  }
  return result;
}

// The names' numbers and those of the entries that they stand for, where the two differ.
py::dict targets(const OpenedIndex& opened) {
  py::dict result;
  size_t unlisted = opened.index.size();
  for (const format::Tie& tie : opened.ties)
    result[py::int_(tie.listed ? size_t{*tie.listed} : unlisted++)] = py::int_(tie.target);
  return result;
}

py::dict as_dict(const std::vector<format::TextPair>& pairs) {
  py::dict result;
  for (const format::TextPair& pair : pairs)
    result[text_to_python(pair.key)] = text_to_python(pair.value);
  return result;
}

// In the order of the file; None where it has none, or where it is sealed and there are no keys.
std::optional<py::dict> metadata(const OpenedIndex& opened, load::KeyRing* keys) {
  if (opened.metadata) return as_dict(*opened.metadata);
  if (!opened.annex || opened.annex->sealed.empty() || keys == nullptr) return std::nullopt;
  const format::Annex unsealed =
      run_interruptible([&](const std::stop_token&) { return load::open_sealed(opened, *keys); });
  if (!unsealed.metadata) return std::nullopt;
  return as_dict(*unsealed.metadata);
}

// Whether the index is the one that was written; None where the file does not tell.
std::optional<bool> index_matches(const OpenedIndex& opened) {
  if (!opened.annex || !opened.annex->digest) return std::nullopt;
  return opened.annex->digest == opened.annex->computed;
}

// The distinct dtypes of the entries, and whether one of them may be a scalar without data, whose
// shape the index writes as (1,).
py::tuple kinds(const OpenedIndex& opened) {
  std::set<std::string_view> dtypes;
  bool scalars = false;
  for (const format::IndexEntry& entry : opened.index.entries()) {
    dtypes.insert(entry.dtype);
    scalars =
        scalars || (entry.data_nbytes == 0 && entry.shape.size() == 1 && entry.shape.front() == 1);
  }
  py::list names;
  for (const std::string_view dtype : dtypes) names.append(py::bytes(dtype.data(), dtype.size()));
  return py::make_tuple(names, scalars);
}

py::tuple shape_tuple(std::span<const uint64_t> shape) {
  py::tuple dims(shape.size());
  for (size_t i = 0; i < shape.size(); ++i) dims[i] = py::int_(shape[i]);
  return dims;
}

uint64_t total_loaded(const OpenedIndex& opened, const std::vector<uint32_t>& selection) {
  uint64_t total = 0;
  for (uint32_t i : selection) {
    if (i >= opened.index.size()) continue;  // counted as its target
    const auto sum = checked_add(total, entry_at(opened, i).loaded_nbytes);
    if (!sum) throw Error(Errc::malformed, "the tensors are larger than memory can be");
    total = *sum;
  }
  return total;
}

// One load of selected tensors into memory that belongs to the batch until tensors are made over
// it.
class LoadBatch {
 public:
  LoadBatch(std::shared_ptr<io::RangeSource> source, std::shared_ptr<OpenedIndex> opened,
            const std::vector<uint32_t>& selection, bool verify, unsigned max_workers,
            std::shared_ptr<load::KeyRing> keys, std::shared_ptr<io::FileMapping> mapping,
            const std::optional<py::function>& allocate,
            const std::optional<std::vector<uint64_t>>& addresses,
            std::shared_ptr<device::CopyEngine> engine, bool headers_only)
      : source_(std::move(source)),
        opened_(std::move(opened)),
        keys_(std::move(keys)),
        engine_(std::move(engine)),
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
    if (addresses) {
      use_addresses(*addresses);
    } else {
      load::allocate(*opened_, source_->size().has_value(),
                     allocate ? memory_of(*allocate) : load::host_memory(*opened_), targets_);
    }
    if (engine_) engine_->order_after_caller();
    const load::LoadOptions options{
        .verify = verify, .max_workers = max_workers, .keys = keys_.get(), .engine = engine_.get()};
    session_ = std::make_unique<load::LoadSession>(*source_, opened_, targets_, options);
  }

  void run(const py::object& progress) {
    run_interruptible(
        session_->is_brief() ? Where::here : Where::helper_thread,
        [this](const std::stop_token& stop) { session_->run(stop); },
        [&] {
          if (!progress.is_none()) progress(session_->nbytes_done());
        });
  }

  // Runs several loads, at most `at_once` of them at a time; the first failure stops the others.
  static void run_all(const std::vector<LoadBatch*>& batches, unsigned at_once,
                      const py::object& progress) {
    run_interruptible(
        Where::helper_thread,
        [&](const std::stop_token& stop) { run_sessions(batches, at_once, stop); },
        [&] {
          uint64_t done = 0;
          for (const LoadBatch* batch : batches) done += batch->session_->nbytes_done();
          if (!progress.is_none()) progress(done);
        });
  }

  std::shared_ptr<const LoadedHeaders> headers() const { return session_->headers(); }

  py::list parameters(TensorFactory& factory) {
    py::list result(targets_.size());
    for (size_t i = 0; i < targets_.size(); ++i) {
      const format::RecordHeader header = session_->headers()->header(i);
      const TensorDtype& dtype = factory.dtype(header.dtype);
      result[i] =
          factory.parameter(factory.tensor(dtype, header.shape, targets_[i].destination, place_),
                            dtype.differentiable);
    }
    return result;
  }

  py::list tensors(TensorFactory& factory) {
    py::list result(targets_.size());
    for (size_t i = 0; i < targets_.size(); ++i) {
      const format::RecordHeader header = session_->headers()->header(i);
      result[i] = factory.tensor(factory.dtype(header.dtype), header.shape, targets_[i].destination,
                                 place_);
    }
    return result;
  }

 private:
  static void run_sessions(const std::vector<LoadBatch*>& batches, unsigned at_once,
                           const std::stop_token& stop) {
    std::atomic<size_t> next{0};
    const auto threads = std::min<size_t>(std::max(at_once, 1U), batches.size());
    run_workers(static_cast<unsigned>(threads), stop, [&](const std::stop_token& token) {
      for (size_t n = next++; n < batches.size(); n = next++) batches[n]->session_->run(token);
    });
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

  // Memory of the caller: of exactly the size that is stored for each tensor.
  void use_addresses(const std::vector<uint64_t>& addresses) {
    if (addresses.size() != targets_.size())
      throw Error(Errc::invalid_argument, "one address per tensor is wanted");
    for (size_t i = 0; i < targets_.size(); ++i) {
      const format::IndexEntry& entry = opened_->index[targets_[i].entry];
      if (entry.data_nbytes != entry.loaded_nbytes)
        throw Error(Errc::malformed, "tensor " + format::display_name(entry.name) + " stores " +
                                         std::to_string(entry.data_nbytes) + " bytes, wanted " +
                                         std::to_string(entry.loaded_nbytes));
      targets_[i].destination = {reinterpret_cast<std::byte*>(addresses[i]), entry.data_nbytes,
                                 nullptr};
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
  std::shared_ptr<load::KeyRing> keys_;
  std::shared_ptr<device::CopyEngine> engine_;
  const TensorPlace place_;
  std::unique_ptr<load::LoadSession> session_;
};

// (hash type, value) of one record, as stored.
py::list stored_hashes(const LoadedHeaders& headers, size_t i) {
  py::list result;
  for (const format::StoredHash& hash : headers.header(i).hashes) {
    result.append(py::make_tuple(
        static_cast<int>(hash.type),
        py::bytes(reinterpret_cast<const char*>(hash.value.data()), hash.value.size())));
  }
  return result;
}

// Whether bytes elsewhere are those the record was written with.
bool matches(const LoadedHeaders& headers, size_t i, uint64_t address, uint64_t nbytes) {
  const std::span<const std::byte> data(reinterpret_cast<const std::byte*>(address), nbytes);
  return run_interruptible([&](const std::stop_token&) { return headers.matches(i, data); });
}

void register_index(py::module_& m) {
  py::class_<OpenedIndex, std::shared_ptr<OpenedIndex>>(m, "Index")
      .def("__len__", &OpenedIndex::name_count)
      .def_property_readonly("entry_count", [](const OpenedIndex& o) { return o.index.size(); })
      .def_property_readonly("index_matches", &index_matches)
      .def_property_readonly("has_annex", [](const OpenedIndex& o) { return o.annex.has_value(); })
      .def_property_readonly(
          "metadata_is_sealed",
          [](const OpenedIndex& o) { return o.annex && !o.annex->sealed.empty(); })
      .def("targets", &targets)
      .def("ties", &ties)
      .def_readonly("start", &OpenedIndex::start)
      .def_property_readonly("format",
                             [](const OpenedIndex& o) {
                               return o.container == format::Container::tensors ? "tensors"
                                                                                : "safetensors";
                             })
      .def_property_readonly("stores_hashes",
                             [](const OpenedIndex& o) { return o.has_record_headers(); })
      .def("metadata", &metadata, py::arg("keys") = py::none())
      .def_property_readonly("version", [](const OpenedIndex& o) { return o.prologue.version; })
      .def_property_readonly("flags", [](const OpenedIndex& o) { return o.prologue.flags; })
      .def_property_readonly("encrypted",
                             [](const OpenedIndex& o) { return o.prologue.has_crypt_info(); })
      .def_property_readonly("tensor_size",
                             [](const OpenedIndex& o) { return o.prologue.tensor_size; })
      .def_property_readonly("metadata_nbytes",
                             [](const OpenedIndex& o) { return o.prologue.metadata_nbytes; })
      .def("names", &names)
      .def("kinds", &kinds)
      .def("total_loaded_nbytes", &total_loaded, py::arg("selection"))
      .def("stored_name",
           [](const OpenedIndex& o, size_t i) {
             entry_at(o, i);
             const std::string_view name = o.name(i);
             return py::bytes(name.data(), name.size());
           })
      .def("dtype",
           [](const OpenedIndex& o, size_t i) {
             const std::string_view dtype = entry_at(o, i).dtype;
             return py::bytes(dtype.data(), dtype.size());
           })
      .def("container_dtype",
           [](const OpenedIndex& o, size_t i) {
             return text_to_python(entry_at(o, i).container_dtype);
           })
      .def("shape",
           [](const OpenedIndex& o, size_t i) { return shape_tuple(entry_at(o, i).shape); })
      .def("type",
           [](const OpenedIndex& o, size_t i) { return static_cast<int>(entry_at(o, i).type); })
      .def("entry_version",
           [](const OpenedIndex& o, size_t i) { return entry_at(o, i).entry_version; })
      .def("offset", [](const OpenedIndex& o, size_t i) { return entry_at(o, i).offset; })
      .def("data_offset", [](const OpenedIndex& o, size_t i) { return entry_at(o, i).data_offset; })
      .def("data_nbytes", [](const OpenedIndex& o, size_t i) { return entry_at(o, i).data_nbytes; })
      .def("loaded_nbytes",
           [](const OpenedIndex& o, size_t i) { return entry_at(o, i).loaded_nbytes; });

  m.def(
      "parse_shard_index",
      [](std::string text) {
        const format::ShardIndex index = format::parse_shard_index(text);
        return py::make_tuple(as_dict(index.weight_map), as_dict(index.metadata));
      },
      py::arg("text"));
  m.def(
      "stored_name",
      [](const py::tuple& path) {
        const std::string stored = format::encode_name(path_from_python(path));
        return py::bytes(stored);
      },
      py::arg("path"));
  m.def("names_of_one_model", &format::read_as_names_of_one_model, py::arg("a"), py::arg("b"));
  m.def(
      "open_index",
      [](io::RangeSource& source, uint64_t start, bool key_given) {
        const auto key = key_given ? format::KeyGiven::yes : format::KeyGiven::no;
        const bool prompt = source.traits().prompt;
        const load::ContainerHead head = run_interruptible(
            prompt ? Where::here : Where::helper_thread,
            [&](auto& stop) { return load::open_head(source, start, key, stop); });
        const bool brief = prompt && head.index_nbytes() <= kBriefIndexNbytes;
        return run_interruptible(brief ? Where::here : Where::helper_thread,
                                 [&](auto& stop) { return load::open_index(source, head, stop); });
      },
      py::arg("source"), py::arg("start"), py::arg("key_given"));
}

void register_batch(py::module_& m) {
  py::class_<LoadedHeaders, std::shared_ptr<LoadedHeaders>>(m, "LoadedHeaders")
      .def("dtype",
           [](const LoadedHeaders& h, size_t i) {
             const std::string_view dtype = h.header(i).dtype;  // borrows from h
             return py::bytes(dtype.data(), dtype.size());
           })
      .def("shape",
           [](const LoadedHeaders& h, size_t i) {
             const format::RecordHeader header = h.header(i);
             return shape_tuple(header.shape);
           })
      .def("module_idx", [](const LoadedHeaders& h, size_t i) { return h.header(i).module_idx; })
      .def("hashes", &stored_hashes)
      .def("matches", &matches, py::arg("i"), py::arg("address"), py::arg("nbytes"));
  py::class_<LoadBatch>(m, "LoadBatch")
      .def(py::init<std::shared_ptr<io::RangeSource>, std::shared_ptr<OpenedIndex>,
                    const std::vector<uint32_t>&, bool, unsigned, std::shared_ptr<load::KeyRing>,
                    std::shared_ptr<io::FileMapping>, const std::optional<py::function>&,
                    const std::optional<std::vector<uint64_t>>&,
                    std::shared_ptr<device::CopyEngine>, bool>(),
           py::arg("source"), py::arg("index"), py::arg("selection"), py::kw_only(),
           py::arg("verify") = false, py::arg("max_workers") = 0, py::arg("keys") = py::none(),
           py::arg("mapping") = py::none(), py::arg("allocate") = py::none(),
           py::arg("addresses") = py::none(), py::arg("engine") = py::none(),
           py::arg("headers_only") = false)
      .def("run", &LoadBatch::run, py::arg("progress") = py::none())
      .def_property_readonly("headers",
                             [](const LoadBatch& batch) {
                               return std::const_pointer_cast<LoadedHeaders>(batch.headers());
                             })
      .def("parameters", &LoadBatch::parameters, py::arg("factory"))
      .def("tensors", &LoadBatch::tensors, py::arg("factory"));
  m.def("run_batches", &LoadBatch::run_all, py::arg("batches"), py::arg("at_once"),
        py::arg("progress") = py::none());
  py::class_<TensorFactory>(m, "TensorFactory").def(py::init<py::function>(), py::arg("resolve"));
}

void register_memory(py::module_& m) {
  using device::KeptMemory;
  m.def(
      "keep_memory",
      [](uint64_t max_nbytes, double seconds) {
        const auto idle = std::chrono::duration<double>(std::min(seconds, 1e6));
        KeptMemory::instance().configure(
            max_nbytes, std::chrono::duration_cast<std::chrono::milliseconds>(idle));
      },
      py::arg("max_nbytes"), py::arg("seconds"));
  m.def("kept_nbytes", [] { return KeptMemory::instance().nbytes(); });
}

void register_keys(py::module_& m) {
  py::class_<load::KeyRing, std::shared_ptr<load::KeyRing>>(m, "KeyRing")
      .def(py::init([](std::shared_ptr<crypto::SecretKey> key) {
             return std::make_shared<load::KeyRing>(key);
           }),
           py::arg("key"))
      .def(py::init([](const py::bytes& passphrase, uint64_t max_opslimit, uint64_t max_memlimit,
                       uint64_t max_derivations) {
             const std::string_view text = passphrase;
             const crypto::DerivationLimits limits{max_opslimit, max_memlimit, max_derivations};
             return std::make_shared<load::KeyRing>(std::as_bytes(std::span(text)), limits);
           }),
           py::arg("passphrase"), py::arg("max_opslimit"), py::arg("max_memlimit"),
           py::arg("max_derivations"));
}

}  // namespace

void register_load(py::module_& m) {
  register_index(m);
  register_memory(m);
  register_keys(m);
  register_batch(m);
}

}  // namespace tensorizer::bind
