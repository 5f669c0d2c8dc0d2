// The cache of remote objects: its folder, and sources over it.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>

#include "bind/bindings.h"
#include "bind/gil.h"
#include "bind/names.h"
#include "io/cache/cache_disk.h"
#include "io/cache/cache_source.h"

namespace tensorizer::bind {
namespace {

using io::CachedVersion;
using io::CacheFolder;
using io::CacheLimits;
using io::CacheSource;

// The names of folders and the content of about.json can be anything.
py::list versions(const CacheFolder& folder, const std::string& location) {
  py::list result;
  for (const auto& [version, about] : folder.versions(location))
    result.append(py::make_tuple(version, py::bytes(about)));
  return result;
}

std::shared_ptr<CacheSource> open_source(std::shared_ptr<CacheFolder> folder,
                                         std::shared_ptr<io::RangeSource> network,
                                         const std::string& location, const std::string& version,
                                         uint64_t nbytes, const std::string& about,
                                         std::optional<uint64_t> max_nbytes,
                                         uint64_t min_free_nbytes, std::string name) {
  const InterpreterUnlock unlocked;
  return CacheSource::open(std::move(folder),
                           {location, version, nbytes, about, {max_nbytes, min_free_nbytes}},
                           std::move(network), std::move(name));
}

// Calls progress(0), if it is not None, while another process makes the copy.
void begin_load(CacheSource& source, uint64_t nbytes, const py::object& progress) {
  run_interruptible(
      Where::helper_thread, [&](const std::stop_token& stop) { source.begin_load(nbytes, stop); },
      report_to(progress, [] { return 0; }));
}

}  // namespace

void register_cache(py::module_& m) {
  const auto unlocked = py::call_guard<InterpreterUnlock>();
  py::class_<CachedVersion>(m, "CachedVersion")
      .def_readonly("location", &CachedVersion::location)
      .def_readonly("version", &CachedVersion::version)
      .def_readonly("nbytes", &CachedVersion::nbytes)
      .def_readonly("disk_nbytes", &CachedVersion::disk_nbytes)
      .def_readonly("used", &CachedVersion::used)
      .def_readonly("newest", &CachedVersion::newest);
  py::class_<CacheFolder, std::shared_ptr<CacheFolder>>(m, "CacheFolder")
      .def(py::init(&CacheFolder::open), py::arg("path"), py::arg("create"), unlocked)
      .def("disk_nbytes", &CacheFolder::disk_nbytes)
      .def("versions", &versions, py::arg("location"))
      .def("scan", &CacheFolder::scan, unlocked)
      .def("has_copy", &CacheFolder::has_copy, py::arg("location"), py::arg("version"),
           py::arg("nbytes"))
      .def("remove", &CacheFolder::remove, py::arg("location"), py::arg("version"), py::kw_only(),
           py::arg("force") = false, unlocked)
      .def("is_used", &CacheFolder::is_used, py::arg("entry"))
      .def(
          "path_of",
          [](const CacheFolder& folder, const CachedVersion& entry) {
            return py::bytes(folder.path_of(entry));
          },
          py::arg("entry"))
      .def("sweep", &CacheFolder::sweep, unlocked);
  py::class_<CacheSource, io::RangeSource, std::shared_ptr<CacheSource>>(m, "CacheSource")
      .def_static("open", &open_source, py::arg("folder"), py::arg("network"), py::kw_only(),
                  py::arg("location"), py::arg("version"), py::arg("nbytes"), py::arg("about"),
                  py::arg("max_nbytes"), py::arg("min_free_nbytes"), py::arg("name"))
      .def_static("check_descriptors", &CacheSource::check_descriptors)
      .def("begin_load", &begin_load, py::arg("nbytes"), py::arg("progress") = py::none())
      .def("fill", interruptible(&CacheSource::fill))
      .def("release", &CacheSource::release, unlocked)
      .def("write_about", &CacheSource::write_about, py::arg("about"))
      .def_property_readonly("key",
                             [](const CacheSource& source) {
                               return std::pair(source.key().location, source.key().version);
                             })
      .def_property_readonly("was_complete", &CacheSource::was_complete)
      .def_property_readonly("cached_bytes_read", &CacheSource::cached_nbytes_read)
      .def_property_readonly("stored_nbytes", &CacheSource::stored_nbytes)
      .def_property_readonly("trouble",
                             [](const CacheSource& source) { return shown(source.trouble()); });
  m.def(
      "finish_caches",
      [](double patience_seconds) {
        return run_interruptible([&](const std::stop_token& stop) {
          return io::CacheDisk::instance().finish(milliseconds_of(patience_seconds), stop);
        });
      },
      py::arg("patience_seconds"));
  m.def("take_cache_troubles", [] {
    py::list result;
    for (const auto& [path, why] : io::CacheDisk::instance().take_troubles())
      result.append(py::make_tuple(shown(path), shown(why)));
    return result;
  });
}

}  // namespace tensorizer::bind
