// Sources and sinks as Python sees them: opaque handles, with plain reads and writes, and the
// digests of their content and of memory.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <tuple>
#include <vector>

#include "bind/bindings.h"
#include "bind/gil.h"
#include "bind/names.h"
#include "core/run_units.h"
#include "core/threads.h"
#include "digest/digest.h"
#include "io/range_sink.h"
#include "io/range_source.h"
#include "save/copy_bytes.h"
#include "save/record_writer.h"

namespace tensorizer::bind {
namespace {

void read(io::RangeSource& source, uint64_t offset, io::Buffer into) {
  const bool brief = into.size() <= io::kBriefNbytes && source.traits().in_memory;
  run_interruptible(brief ? Where::here : Where::helper_thread,
                    [&](const std::stop_token& stop) { source.read_at(offset, into, stop); });
}

py::bytes read_bytes(io::RangeSource& source, uint64_t offset, size_t nbytes) {
  const py::bytes result = new_bytes(nbytes);
  read(source, offset, contents(result));
  return result;
}

void read_into(io::RangeSource& source, uint64_t offset, const py::buffer& buffer) {
  read(source, offset, BytesView(buffer, true).writable_bytes());
}

// Whether the bytes are in memory already; copies them then.
bool copy_from_memory(io::RangeSource& source, uint64_t offset, io::Buffer into) {
  const std::byte* const at = source.view(offset, into.size());
  if (at != nullptr) std::copy_n(at, into.size(), into.data());
  return at != nullptr;
}

uint64_t read_up_to(io::RangeSource& source, uint64_t offset, const py::buffer& buffer) {
  const BytesView view(buffer, true);
  const io::Buffer into = view.writable_bytes();
  if (copy_from_memory(source, offset, into)) return into.size();
  return run_interruptible(
      [&](const std::stop_token& stop) { return source.read_up_to(offset, into, stop); });
}

void read_into_parallel(io::RangeSource& source, uint64_t offset, const py::buffer& buffer) {
  const BytesView view(buffer, true);
  run_interruptible([&](const std::stop_token& stop) {
    io::read_parallel(source, offset, view.writable_bytes(), stop);
  });
}

py::bytes read_parallel(io::RangeSource& source, uint64_t offset, size_t nbytes) {
  const py::bytes result = new_bytes(nbytes);
  const io::Buffer into = contents(result);
  if (copy_from_memory(source, offset, into)) return result;
  run_interruptible(
      [&](const std::stop_token& stop) { io::read_parallel(source, offset, into, stop); });
  return result;
}

py::bytes sha256_of(io::RangeSource& source, const py::object& progress) {
  std::atomic<uint64_t> done{0};
  const digest::Sha256Digest digest = run_interruptible(
      Where::helper_thread,
      [&](const std::stop_token& stop) { return save::sha256_of(source, done, stop); },
      report_to(progress, [&] { return done.load(); }));
  return to_bytes(digest);
}

void write_at(io::RangeSink& sink, uint64_t offset, const py::buffer& buffer) {
  const BytesView view(buffer);
  run_interruptible(
      [&](const std::stop_token& stop) { sink.write_at(offset, view.bytes(), stop); });
}

// (offset, address, bytes) per piece of host memory; by as many threads as are useful.
void write_pieces(io::RangeSink& sink,
                  const std::vector<std::tuple<uint64_t, uint64_t, uint64_t>>& pieces) {
  std::vector<save::PlannedRecord> places(pieces.size());
  std::vector<device::TensorMemory> payloads(pieces.size());
  for (size_t i = 0; i < pieces.size(); ++i) {
    const auto& [offset, address, nbytes] = pieces[i];
    places[i].offset = offset;
    places[i].data_nbytes = nbytes;
    payloads[i] = {reinterpret_cast<std::byte*>(address), nbytes, nullptr};
  }
  std::atomic<uint64_t> done{0};
  run_interruptible(
      Where::helper_thread,
      [&](const std::stop_token& stop) {
        save::write_records({.records = places, .payloads = payloads, .nbytes_done = done}, sink,
                            stop);
      },
      [] {}, [&] { sink.abandon(); });
}

uint64_t copy_from(io::RangeSink& sink, io::RangeSource& source, const py::object& progress) {
  std::atomic<uint64_t> done{0};
  return run_interruptible(
      Where::helper_thread,
      [&](const std::stop_token& stop) { return save::copy_bytes(source, sink, done, stop); },
      report_to(progress, [&] { return done.load(); }), [&] { sink.abandon(); });
}

void publish(io::RangeSink& sink, uint64_t end) {
  run_interruptible([&](const std::stop_token& stop) { sink.publish(end, stop); });
}

// CRC-32 of each (address, bytes), by as many threads as are useful.
std::vector<uint32_t> crc32_of(const std::vector<std::pair<uint64_t, uint64_t>>& payloads) {
  std::vector<uint32_t> crcs(payloads.size());
  run_interruptible([&](const std::stop_token& stop) {
    for_each_index(payloads.size(), cpu_quota(), stop, [&](size_t i, const std::stop_token&) {
      const auto [address, nbytes] = payloads[i];
      crcs[i] = digest::crc32(0, {reinterpret_cast<const std::byte*>(address), nbytes});
    });
  });
  return crcs;
}

}  // namespace

void register_io(py::module_& m) {
  const auto unlocked = py::call_guard<InterpreterUnlock>();
  m.def("cpu_quota", &cpu_quota);
  m.def("crc32_of", &crc32_of, py::arg("payloads"));
  using io::RangeSink;
  using io::RangeSource;
  py::class_<RangeSource, std::shared_ptr<RangeSource>>(m, "RangeSource")
      .def_property_readonly("name", [](const RangeSource& self) { return shown(self.name()); })
      .def("size", &RangeSource::size)
      .def("close", &RangeSource::close, unlocked)
      .def("drop_copy", &RangeSource::drop_copy, unlocked)
      .def_property_readonly("bytes_read", &RangeSource::bytes_read)
      .def_property_readonly("concurrency",
                             [](const RangeSource& s) { return s.traits().concurrency; })
      .def_property_readonly("in_memory", [](const RangeSource& s) { return s.traits().in_memory; })
      .def("read", &read_bytes, py::arg("offset"), py::arg("nbytes"))
      .def("readinto", &read_into, py::arg("offset"), py::arg("buffer"))
      .def("readinto_parallel", &read_into_parallel, py::arg("offset"), py::arg("buffer"))
      .def("read_parallel", &read_parallel, py::arg("offset"), py::arg("nbytes"))
      .def("read_up_to", &read_up_to, py::arg("offset"), py::arg("buffer"));
  py::class_<RangeSink, std::shared_ptr<RangeSink>>(m, "RangeSink")
      .def_property_readonly("name", [](const RangeSink& self) { return shown(self.name()); })
      .def("reserve", &RangeSink::reserve, py::arg("end"), unlocked)
      .def("write_at", &write_at, py::arg("offset"), py::arg("buffer"))
      .def("write_pieces", &write_pieces, py::arg("pieces"))
      .def("copy_from", &copy_from, py::arg("source"), py::arg("progress") = py::none())
      .def("publish", &publish, py::arg("end"))
      .def("finish", interruptible(&RangeSink::finish))
      .def("abandon", &RangeSink::abandon, unlocked);
  m.def("sha256_of", &sha256_of, py::arg("source"), py::arg("progress") = py::none());
}

}  // namespace tensorizer::bind
