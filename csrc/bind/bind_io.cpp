// Sources and sinks as Python sees them: opaque handles, plus plain reads for the stream classes.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <memory>

#include "bind/bindings.h"
#include "bind/gil.h"
#include "bind/names.h"
#include "core/threads.h"
#include "io/range_sink.h"
#include "io/range_source.h"
#include "load/request_costs.h"

namespace tensorizer::bind {
namespace {

void read(io::RangeSource& source, uint64_t offset, io::Slice into) {
  const bool brief = into.size() <= load::kBriefNbytes && source.traits().prompt;
  run_interruptible(brief ? Where::here : Where::helper_thread,
                    [&](const std::stop_token& stop) { source.read_at(offset, into, stop); });
}

py::bytes read_bytes(io::RangeSource& source, uint64_t offset, size_t nbytes) {
  py::bytes result = py::reinterpret_steal<py::bytes>(
      PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(nbytes)));
  if (!result) throw py::error_already_set();
  io::Slice into(reinterpret_cast<std::byte*>(PyBytes_AS_STRING(result.ptr())), nbytes);
  read(source, offset, into);
  return result;
}

void read_into(io::RangeSource& source, uint64_t offset, const py::buffer& buffer) {
  py::buffer_info info = buffer.request(true);
  io::Slice into(static_cast<std::byte*>(info.ptr), static_cast<size_t>(info.size * info.itemsize));
  read(source, offset, into);
}

uint64_t read_up_to(io::RangeSource& source, uint64_t offset, const py::buffer& buffer) {
  py::buffer_info info = buffer.request(true);
  const io::Slice into(static_cast<std::byte*>(info.ptr),
                       static_cast<size_t>(info.size * info.itemsize));
  if (const std::byte* at = source.view(offset, into.size())) {
    std::copy_n(at, into.size(), into.data());
    return into.size();
  }
  return run_interruptible(
      [&](const std::stop_token& stop) { return source.read_up_to(offset, into, stop); });
}

io::Slice writable_bytes(const py::buffer_info& info) {
  return {static_cast<std::byte*>(info.ptr), static_cast<size_t>(info.size * info.itemsize)};
}

void read_into_parallel(io::RangeSource& source, uint64_t offset, const py::buffer& buffer) {
  py::buffer_info info = buffer.request(true);
  run_interruptible([&](const std::stop_token& stop) {
    io::read_parallel(source, offset, writable_bytes(info), stop);
  });
}

py::bytes read_parallel(io::RangeSource& source, uint64_t offset, size_t nbytes) {
  PyObject* object = PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(nbytes));
  if (object == nullptr) throw py::error_already_set();
  py::bytes result = py::reinterpret_steal<py::bytes>(object);
  const io::Slice into(reinterpret_cast<std::byte*>(PyBytes_AS_STRING(object)), nbytes);
  if (const std::byte* at = source.view(offset, nbytes)) {
    std::copy_n(at, nbytes, into.data());
    return result;
  }
  run_interruptible(
      [&](const std::stop_token& stop) { io::read_parallel(source, offset, into, stop); });
  return result;
}

}  // namespace

void register_io(py::module_& m) {
  m.def("cpu_quota", &cpu_quota);
  using io::RangeSink;
  using io::RangeSource;
  py::class_<RangeSource, std::shared_ptr<RangeSource>>(m, "RangeSource")
      .def_property_readonly("name", [](const RangeSource& self) { return shown(self.name()); })
      .def("size", &RangeSource::size)
      .def("close", &RangeSource::close, py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("bytes_read", &RangeSource::bytes_read)
      .def_property_readonly("concurrency",
                             [](const RangeSource& s) { return s.traits().concurrency; })
      .def_property_readonly("prompt", [](const RangeSource& s) { return s.traits().prompt; })
      .def("read", &read_bytes, py::arg("offset"), py::arg("nbytes"))
      .def("readinto", &read_into, py::arg("offset"), py::arg("buffer"))
      .def("readinto_parallel", &read_into_parallel, py::arg("offset"), py::arg("buffer"))
      .def("read_parallel", &read_parallel, py::arg("offset"), py::arg("nbytes"))
      .def("read_up_to", &read_up_to, py::arg("offset"), py::arg("buffer"));
  py::class_<RangeSink, std::shared_ptr<RangeSink>>(m, "RangeSink")
      .def_property_readonly("name", [](const RangeSink& self) { return shown(self.name()); });
}

}  // namespace tensorizer::bind
