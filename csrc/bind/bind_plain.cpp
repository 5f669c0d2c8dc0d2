// Writing payloads without records (.safetensors), and digests of what is in memory.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <atomic>
#include <memory>
#include <tuple>
#include <vector>

#include "bind/bindings.h"
#include "bind/gil.h"
#include "core/run_units.h"
#include "core/threads.h"
#include "format/digest.h"
#include "save/copy_bytes.h"
#include "save/record_writer.h"

namespace tensorizer::bind {
namespace {

// A sink that is filled piece by piece by who knows the content. Confined to one thread; workers
// are its own.
class PlainWriter {
 public:
  PlainWriter(std::shared_ptr<io::RangeSink> sink, unsigned max_workers)
      : sink_(std::move(sink)), max_workers_(max_workers) {}

  io::RangeSink& sink() noexcept { return *sink_; }
  uint64_t nbytes_done() const noexcept { return nbytes_done_.load(std::memory_order_relaxed); }

  void write(std::span<save::PlannedRecord> places, std::span<const device::TensorMemory> payloads,
             const std::stop_token& stop) {
    save::write_records({.records = places,
                         .payloads = payloads,
                         .max_workers = max_workers_,
                         .nbytes_done = nbytes_done_},
                        *sink_, stop);
  }

 private:
  const std::shared_ptr<io::RangeSink> sink_;
  const unsigned max_workers_;  // 0: as many as are useful
  std::atomic<uint64_t> nbytes_done_{0};
};

// (offset, address, bytes) per piece.
void write(PlainWriter& writer, const std::vector<std::tuple<uint64_t, uint64_t, uint64_t>>& items,
           const py::object& progress) {
  std::vector<save::PlannedRecord> places(items.size());
  std::vector<device::TensorMemory> payloads(items.size());
  for (size_t i = 0; i < items.size(); ++i) {
    const auto& [offset, address, nbytes] = items[i];
    places[i].offset = offset;
    places[i].data_nbytes = nbytes;
    payloads[i] = {reinterpret_cast<std::byte*>(address), nbytes, nullptr};
  }
  run_interruptible(
      Where::helper_thread,
      [&](const std::stop_token& stop) { writer.write(places, payloads, stop); },
      report_to(progress, [&] { return writer.nbytes_done(); }), [&] { writer.sink().abandon(); });
}

void write_bytes(PlainWriter& writer, uint64_t offset, const py::bytes& bytes) {
  const std::string_view text = bytes;
  const auto view = std::as_bytes(std::span(text));
  run_interruptible(
      [&](const std::stop_token& stop) { writer.sink().write_at(offset, view, stop); });
}

// CRC-32 of each (address, bytes), by as many threads as are useful.
std::vector<uint32_t> crc32_of(const std::vector<std::pair<uint64_t, uint64_t>>& payloads) {
  std::vector<uint32_t> crcs(payloads.size());
  run_interruptible([&](const std::stop_token& stop) {
    for_each_index(payloads.size(), cpu_quota(), stop, [&](size_t i, const std::stop_token&) {
      const auto [address, nbytes] = payloads[i];
      crcs[i] = format::crc32(0, {reinterpret_cast<const std::byte*>(address), nbytes});
    });
  });
  return crcs;
}

uint64_t copy_from(PlainWriter& writer, io::RangeSource& source, const py::object& progress) {
  std::atomic<uint64_t> done{0};
  return run_interruptible(
      Where::helper_thread,
      [&](const std::stop_token& stop) {
        return save::copy_bytes(source, writer.sink(), done, stop);
      },
      report_to(progress, [&] { return done.load(); }), [&] { writer.sink().abandon(); });
}

py::bytes sha256_of(io::RangeSource& source, const py::object& progress) {
  std::atomic<uint64_t> done{0};
  const format::Sha256Digest digest = run_interruptible(
      Where::helper_thread,
      [&](const std::stop_token& stop) { return save::sha256_of(source, done, stop); },
      report_to(progress, [&] { return done.load(); }), [] {});
  return to_bytes(digest);
}

}  // namespace

void register_plain(py::module_& m) {
  py::class_<PlainWriter>(m, "PlainWriter")
      .def(py::init<std::shared_ptr<io::RangeSink>, unsigned>(), py::arg("sink"),
           py::arg("max_workers") = 0)
      .def("reserve",
           [](PlainWriter& w, uint64_t end) {
             py::gil_scoped_release unlocked;
             w.sink().reserve(end);
           })
      .def("write", &write, py::arg("pieces"), py::arg("progress") = py::none())
      .def("copy_from", &copy_from, py::arg("source"), py::arg("progress") = py::none())
      .def("write_bytes", &write_bytes, py::arg("offset"), py::arg("data"))
      .def("publish",
           [](PlainWriter& w, uint64_t end) {
             run_interruptible([&](const std::stop_token& stop) { w.sink().publish(end, stop); });
           })
      .def("finish",
           [](PlainWriter& w) {
             run_interruptible([&](const std::stop_token& stop) { w.sink().finish(stop); });
           })
      .def("abandon",
           [](PlainWriter& w) {
             py::gil_scoped_release unlocked;
             w.sink().abandon();
           })
      .def_property_readonly("nbytes_done", &PlainWriter::nbytes_done);
  m.def("sha256_of", &sha256_of, py::arg("source"), py::arg("progress") = py::none());
  m.def("crc32_of", &crc32_of, py::arg("payloads"));
}

}  // namespace tensorizer::bind
