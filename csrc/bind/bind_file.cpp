// Local files and Python file objects as sources and sinks.
#include <fcntl.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <tuple>

#include "bind/bindings.h"
#include "bind/gil.h"
#include "bind/py_file_sink.h"
#include "bind/py_file_source.h"
#include "bind/py_range_source.h"
#include "core/error.h"
#include "io/local/file_mapping.h"
#include "io/local/file_sink.h"
#include "io/local/file_source.h"
#include "io/local/file_system.h"

namespace tensorizer::bind {
namespace {

namespace py = pybind11;

// Mode, owner and group; -1 for those of any new file.
using Access = std::tuple<unsigned, int64_t, int64_t>;

io::FileAccess file_access(const Access& access) {
  const auto [mode, owner, group] = access;
  return {mode, static_cast<uint32_t>(owner), static_cast<uint32_t>(group)};
}

UniqueFd duplicate(int fd, const std::string& name) {
  UniqueFd copy(fcntl(fd, F_DUPFD_CLOEXEC, 0));
  if (!copy) throw_errno("cannot use the descriptor of", name, errno);
  return copy;
}

}  // namespace

void register_file(py::module_& m) {
  using io::FileSink;
  using io::FileSource;
  py::class_<FileSource, io::RangeSource, std::shared_ptr<FileSource>>(m, "FileSource")
      .def(py::init([](int fd, std::string name) {
             UniqueFd own = duplicate(fd, name);
             return std::make_shared<FileSource>(std::move(own), std::move(name));
           }),
           py::arg("fd"), py::arg("name"))
      .def_property_readonly("was_cached", &FileSource::was_cached)
      .def("set_direct", &FileSource::set_direct, py::arg("direct"))
      .def("let_go_behind", &FileSource::let_go_behind)
      .def("close_between_reads", &FileSource::close_between_reads, py::arg("path"))
      .def("on_network_file_system", &FileSource::on_network_file_system)
      .def("map", &FileSource::map);
  py::class_<io::FileMapping, std::shared_ptr<io::FileMapping>>(m, "FileMapping")
      .def_property_readonly("nbytes",
                             [](const io::FileMapping& map) { return map.bytes().size(); })
      .def(
          "populate",
          [](const io::FileMapping& map, uint64_t offset, uint64_t nbytes) {
            run_interruptible(
                [&](const std::stop_token& stop) { map.populate(offset, nbytes, stop); });
          },
          py::arg("offset"), py::arg("nbytes"));
  py::class_<PyFileSource, io::RangeSource, std::shared_ptr<PyFileSource>>(m, "PyFileSource")
      .def(py::init<py::object, std::string>(), py::arg("file"), py::arg("name"));
  py::class_<PyRangeSource, io::RangeSource, std::shared_ptr<PyRangeSource>>(m, "PyRangeSource")
      .def(py::init([](py::object read, uint64_t nbytes, std::string name, unsigned concurrency,
                       uint64_t unit_nbytes, uint64_t gap_nbytes) {
             const io::SourceTraits traits{concurrency, unit_nbytes, gap_nbytes, false};
             return std::make_shared<PyRangeSource>(std::move(read), nbytes, std::move(name),
                                                    traits);
           }),
           py::arg("read"), py::arg("nbytes"), py::arg("name"), py::kw_only(),
           py::arg("concurrency"), py::arg("unit_nbytes"), py::arg("gap_nbytes"));

  m.def(
      "set_access",
      [](int fd, const Access& access, const std::string& name) {
        return io::set_access(fd, file_access(access), name);
      },
      py::arg("fd"), py::arg("access"), py::arg("name"));
  using Unlocked =
      py::call_guard<InterpreterUnlock>;  // a FUSE file system may be served by this process
  m.def("is_mount_point", &io::is_mount_point, py::arg("path"), Unlocked());
  m.def(
      "folder_traits",
      [](const std::string& folder) {
        const io::FolderTraits traits = io::folder_traits(folder);
        return std::pair(traits.renames, traits.any_order);
      },
      py::arg("folder"), Unlocked());
  py::class_<FileSink, io::RangeSink, std::shared_ptr<FileSink>>(m, "FileSink")
      .def_static(
          "replace",
          [](const std::string& target, bool fsync, const std::optional<Access>& access) {
            FileSink::PathOptions options{.fsync = fsync};
            if (access) options.access = file_access(*access);
            return FileSink::replace(target, options);
          },
          py::arg("target"), py::arg("fsync"), py::arg("access") = py::none(), Unlocked())
      .def_static(
          "in_place",
          [](const std::string& target, bool fsync, bool in_order) {
            return FileSink::in_place(target, {.fsync = fsync, .in_order = in_order});
          },
          py::arg("target"), py::arg("fsync"), py::arg("in_order"), Unlocked())
      .def_property_readonly("has_mode", &FileSink::has_mode)
      .def_static(
          "overwrite",
          [](int fd, const std::string& name) {
            return FileSink::overwrite(duplicate(fd, name), name);
          },
          py::arg("fd"), py::arg("name"));
  py::class_<PyFileSink, io::RangeSink, std::shared_ptr<PyFileSink>>(m, "PyFileSink")
      .def(py::init<py::object, std::string>(), py::arg("file"), py::arg("name"));
}

}  // namespace tensorizer::bind
