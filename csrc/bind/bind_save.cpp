// Writing a container call by call.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bind/bindings.h"
#include "bind/gil.h"
#include "bind/names.h"
#include "save/save_session.h"

namespace tensorizer::bind {
namespace {

using save::SaveSession;
using save::TensorToWrite;

// (path, stored dtype, shape, type, module index, payload bytes, meta) as the serializer describes
// a tensor.
TensorToWrite describe(const py::tuple& item, format::TensorPath& path) {
  TensorToWrite tensor;
  path = path_from_python(item[0].cast<py::tuple>());
  tensor.name = format::encode_name(path);
  tensor.dtype = static_cast<std::string>(item[1].cast<py::bytes>());
  tensor.shape = item[2].cast<std::vector<uint64_t>>();
  tensor.type = static_cast<format::TensorType>(item[3].cast<uint8_t>());
  tensor.module_idx = item[4].cast<uint16_t>();
  tensor.data_nbytes = item[5].cast<uint64_t>();
  tensor.meta = item[6].cast<bool>();
  return tensor;
}

// Waits for a part of a call; an interpreter that exits meanwhile undoes the call.
template <class Work, class Poll>
void run_part(SaveSession& session, bool brief, Work&& work, Poll&& on_poll) {
  run_interruptible(brief ? Where::here : Where::helper_thread, std::forward<Work>(work),
                    std::forward<Poll>(on_poll), [&] { session.abort_call(); });
}

void begin_call(SaveSession& session, const py::list& items, bool growing, const py::list& pairs) {
  std::vector<save::TieToWrite> ties;
  for (const py::handle pair : pairs) {
    const auto [alias, target, listed] = pair.cast<std::tuple<py::tuple, py::tuple, bool>>();
    ties.push_back({path_from_python(alias), path_from_python(target), listed});
  }
  std::vector<TensorToWrite> tensors;
  std::vector<format::TensorPath> paths(items.size());
  tensors.reserve(items.size());
  for (size_t i = 0; i < items.size(); ++i)
    tensors.push_back(describe(items[i].cast<py::tuple>(), paths[i]));
  run_part(
      session, session.is_brief(tensors, growing),
      [&](const std::stop_token& stop) {
        session.begin_call(std::move(tensors), paths, ties, growing, stop);
      },
      [] {});
}

// (address, bytes) of the next records, zero-sized ones included.
void write_payloads(SaveSession& session, const py::list& items, device::CopyEngine* engine,
                    const py::object& progress) {
  std::vector<device::TensorMemory> payloads;
  payloads.reserve(items.size());
  for (const py::handle item : items) {
    const auto [address, nbytes] = item.cast<std::pair<uint64_t, uint64_t>>();
    payloads.push_back({reinterpret_cast<std::byte*>(address), nbytes, nullptr});
  }
  if (engine != nullptr) engine->order_after_caller();
  run_part(
      session, session.call_is_brief() && engine == nullptr,
      [&](const std::stop_token& stop) { session.write_payloads(payloads, engine, stop); },
      report_to(progress, [&] { return session.nbytes_done(); }));
}

// (data offset, CRC-32 or None, SHA-256 or None) per record.
py::list record_facts(const SaveSession& session) {
  py::list result;
  for (const save::RecordFacts& facts : session.records()) {
    py::object sha256 = py::none();
    if (facts.sha256) sha256 = to_bytes(*facts.sha256);
    result.append(py::make_tuple(facts.data_offset, py::cast(facts.crc32), sha256));
  }
  return result;
}

std::unique_ptr<SaveSession> make_session(std::shared_ptr<io::RangeSink> sink, uint64_t start,
                                          bool crc32, bool sha256, unsigned max_workers,
                                          std::shared_ptr<crypto::SecretKey> key,
                                          const std::optional<Derivation>& derivation,
                                          std::vector<format::OwnedPair> metadata,
                                          std::shared_ptr<crypto::Signer> signer,
                                          bool binds_records) {
  save::SaveOptions options{.hashes = {crc32, sha256},
                            .max_workers = max_workers,
                            .key = std::move(key),
                            .derivation = std::nullopt,
                            .metadata = std::move(metadata),
                            .signer = std::move(signer),
                            .binds_records = binds_records};
  if (derivation) options.derivation = derivation_of(*derivation);
  return std::make_unique<SaveSession>(std::move(sink), start, options);
}

}  // namespace

void register_save(py::module_& m) {
  using Unlocked = py::call_guard<InterpreterUnlock>;
  py::class_<SaveSession>(m, "SaveSession")
      .def(py::init(&make_session), py::arg("sink"), py::arg("start"), py::kw_only(),
           py::arg("crc32"), py::arg("sha256"), py::arg("max_workers") = 0,
           py::arg("key") = py::none(), py::arg("derivation") = py::none(),
           py::arg("metadata") = std::vector<format::OwnedPair>{}, py::arg("signer") = py::none(),
           py::arg("binds_records") = false)
      .def("begin_call", &begin_call, py::arg("tensors"), py::arg("growing"),
           py::arg("ties") = py::list())
      .def("set_metadata", &SaveSession::set_metadata, py::arg("key"), py::arg("value"))
      .def("write_payloads", &write_payloads, py::arg("payloads"), py::kw_only(),
           py::arg("engine") = py::none(), py::arg("progress") = py::none())
      .def("records", &record_facts)
      .def("finish_call",
           [](SaveSession& session) {
             run_part(
                 session, session.call_is_brief(),
                 [&](const std::stop_token& stop) { session.finish_call(stop); }, [] {});
           })
      .def("abort_call", &SaveSession::abort_call, Unlocked())
      .def("finish", interruptible(&SaveSession::finish))
      .def("abandon", &SaveSession::abandon, Unlocked())
      .def_property_readonly("tensor_nbytes", &SaveSession::tensor_nbytes)
      .def_property_readonly("index_digest",
                             [](const SaveSession& session) -> std::optional<py::bytes> {
                               const auto& digest = session.index_digest();
                               if (!digest) return std::nullopt;
                               return to_bytes(*digest);
                             })
      .def_property_readonly("published_nbytes", &SaveSession::published_nbytes);
}

}  // namespace tensorizer::bind
