// Opening: the index as columns, keys.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <set>
#include <stop_token>

#include "bind/bindings.h"
#include "bind/gil.h"
#include "bind/names.h"
#include "bind/torch_bridge.h"
#include "core/checked_math.h"
#include "core/error.h"
#include "core/run_units.h"
#include "device/host_arena.h"
#include "format/safetensors.h"
#include "load/hashed_source.h"
#include "load/open_index.h"
#include "sign/authenticity.h"

namespace tensorizer::bind {
namespace {

using load::OpenedIndex;

constexpr uint64_t kBriefIndexNbytes = uint64_t{1} << 20;  // parsed in a few milliseconds

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

// In the order of the file; None if it has no metadata, or sealed metadata and there are no keys.
std::optional<py::dict> metadata(const OpenedIndex& opened, load::KeyRing* keys) {
  if (opened.metadata) return as_dict(*opened.metadata);
  if (!opened.annex || opened.annex->sealed.empty() || keys == nullptr) return std::nullopt;
  const format::Annex unsealed =
      run_interruptible([&](const std::stop_token&) { return sign::open_sealed(opened, *keys); });
  if (!unsealed.metadata) return std::nullopt;
  return as_dict(*unsealed.metadata);
}

// Whether the index is the one that was written; None if the file has no digest of it.
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
  for (const std::string_view dtype : dtypes) names.append(to_bytes(dtype));
  return py::make_tuple(names, scalars);
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

void register_index(py::module_& m) {
  py::class_<OpenedIndex, std::shared_ptr<OpenedIndex>> index(m, "Index");
  index.def("__len__", &OpenedIndex::name_count)
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
             return to_bytes(o.name(i));
           })
      .def("dtype", [](const OpenedIndex& o, size_t i) { return to_bytes(entry_at(o, i).dtype); })
      .def("container_dtype",
           [](const OpenedIndex& o, size_t i) {
             return text_to_python(entry_at(o, i).container_dtype);
           })
      .def("shape",
           [](const OpenedIndex& o, size_t i) { return shape_tuple(entry_at(o, i).shape); })
      .def("type",
           [](const OpenedIndex& o, size_t i) { return static_cast<int>(entry_at(o, i).type); });
  const auto define = [&](const char* name, auto field) {
    index.def(name, [field](const OpenedIndex& o, size_t i) { return entry_at(o, i).*field; });
  };
  using Entry = format::IndexEntry;
  define("entry_version", &Entry::entry_version);
  define("offset", &Entry::offset);
  define("data_offset", &Entry::data_offset);
  define("data_nbytes", &Entry::data_nbytes);
  define("loaded_nbytes", &Entry::loaded_nbytes);

  m.def(
      "parse_shard_index",
      [](std::string text) {
        const format::ShardIndex shards = format::parse_shard_index(text);
        return py::make_tuple(as_dict(shards.weight_map), as_dict(shards.metadata));
      },
      py::arg("text"));
  m.def(
      "stored_name",
      [](const py::tuple& path) { return py::bytes(format::encode_name(path_from_python(path))); },
      py::arg("path"));
  m.def("names_of_one_model", &format::read_as_names_of_one_model, py::arg("a"), py::arg("b"));
  m.def(
      "open_index",
      [](io::RangeSource& source, uint64_t start, bool key_given) {
        const auto key = key_given ? format::KeyGiven::yes : format::KeyGiven::no;
        const bool in_memory = source.traits().in_memory;
        const load::ContainerHead head = run_interruptible(
            in_memory ? Where::here : Where::helper_thread,
            [&](auto& stop) { return load::open_head(source, start, key, stop); });
        const bool brief = in_memory && head.index_nbytes() <= kBriefIndexNbytes;
        return run_interruptible(brief ? Where::here : Where::helper_thread,
                                 [&](auto& stop) { return load::open_index(source, head, stop); });
      },
      py::arg("source"), py::arg("start"), py::arg("key_given"));
}

void register_hashed_source(py::module_& m) {
  using load::HashedSource;
  py::class_<HashedSource, io::RangeSource, std::shared_ptr<HashedSource>>(m, "HashedSource")
      .def(py::init<std::shared_ptr<io::RangeSource>>(), py::arg("source"));
  m.def(
      "finish_hashes",
      [](const std::vector<std::shared_ptr<HashedSource>>& sources, unsigned at_once) {
        std::vector<digest::Sha256Digest> digests(sources.size());
        run_interruptible(Where::helper_thread, [&](const std::stop_token& stop) {
          for_each_index(sources.size(), at_once, stop,
                         [&](size_t i, const std::stop_token& token) {
                           digests[i] = sources[i]->finish(token);
                         });
        });
        py::list found;
        for (const digest::Sha256Digest& digest : digests) found.append(to_bytes(digest));
        return found;
      },
      py::arg("sources"), py::arg("at_once"));
}

void register_memory(py::module_& m) {
  using device::KeptMemory;
  m.def(
      "keep_memory",
      [](uint64_t max_nbytes, double seconds) {
        KeptMemory::instance().configure(max_nbytes, milliseconds_of(std::min(seconds, 1e6)));
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
             const crypto::DerivationLimits limits{max_opslimit, max_memlimit, max_derivations};
             return std::make_shared<load::KeyRing>(bytes_of(passphrase), limits);
           }),
           py::arg("passphrase"), py::arg("max_opslimit"), py::arg("max_memlimit"),
           py::arg("max_derivations"));
}

}  // namespace

void register_load(py::module_& m) {
  register_index(m);
  register_hashed_source(m);
  register_memory(m);
  register_keys(m);
}

}  // namespace tensorizer::bind
