// Redis as Python sees it: a source, and the writer behind to_redis.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <vector>

#include "bind/bindings.h"
#include "bind/gil.h"
#include "io/redis/redis_source.h"
#include "io/redis/redis_writer.h"

namespace tensorizer::bind {
namespace {

using io::RedisOptions;
using io::RedisSource;
using io::RedisWriter;

template <class T>
void set_from(const py::dict& settings, const char* name, T& field) {
  if (settings.contains(name)) field = settings[name].cast<T>();
}

void set_from(const py::dict& settings, const char* name, std::chrono::milliseconds& field) {
  if (settings.contains(name)) field = milliseconds_of(settings[name].cast<double>());
}

// The keys are those that tensorizer/_io/redis.py makes; a missing one leaves the default of
// the C++ struct.
RedisOptions to_options(const py::dict& settings) {
  RedisOptions options;
  set_from(settings, "host", options.socket.host);
  set_from(settings, "port", options.socket.port);
  set_from(settings, "unix_path", options.socket.unix_path);
  set_from(settings, "connect_timeout", options.socket.connect_timeout);
  set_from(settings, "stall_timeout", options.socket.stall_timeout);
  set_from(settings, "receive_buffer_nbytes", options.socket.receive_buffer_nbytes);
  set_from(settings, "tls", options.socket.tls);
  set_from(settings, "ca_file", options.socket.trust.ca_file);
  set_from(settings, "ca_path", options.socket.trust.ca_path);
  set_from(settings, "certificate_file", options.socket.trust.certificate_file);
  set_from(settings, "key_file", options.socket.trust.key_file);
  set_from(settings, "verify_certificate", options.socket.trust.verify_peer);
  set_from(settings, "verify_host", options.socket.trust.verify_host);
  set_from(settings, "user", options.user);
  set_from(settings, "password", options.password);
  set_from(settings, "database", options.database);
  set_from(settings, "connections", options.connections);
  set_from(settings, "retries", options.retry.retries);
  set_from(settings, "retry_seconds", options.retry.window);
  set_from(settings, "first_answer_seconds", options.retry.first_answer_window);
  return options;
}

std::shared_ptr<RedisSource> open_redis(const py::dict& settings, const std::string& prefix) {
  const RedisOptions options = to_options(settings);
  return run_interruptible([&](const std::stop_token& stop) {
    return std::make_shared<RedisSource>(options, prefix, stop);
  });
}

void put(RedisWriter& writer, const std::string& key, const py::bytes& value) {
  const io::ConstBuffer bytes = bytes_of(value);
  run_interruptible([&](const std::stop_token& stop) { writer.put(key, bytes, stop); });
}

// (key stem, header offset, payload offset, payload bytes)
using RecordTuple = std::tuple<std::string, uint64_t, uint64_t, uint64_t>;

void write_records(RedisWriter& writer, io::RangeSource& source,
                   const std::vector<RecordTuple>& tuples) {
  std::vector<io::RedisRecord> records;
  records.reserve(tuples.size());
  for (const auto& [stem, header, data, nbytes] : tuples)
    records.push_back({stem, header, data, nbytes});
  run_interruptible([&](const std::stop_token& stop) { writer.write(source, records, stop); });
}

}  // namespace

void register_redis(py::module_& m) {
  py::class_<RedisSource, io::RangeSource, std::shared_ptr<RedisSource>>(m, "RedisSource")
      .def(py::init(&open_redis), py::arg("settings"), py::arg("prefix"))
      .def_property_readonly("end", &RedisSource::end)
      .def("close_connections", &RedisSource::close_connections,
           py::call_guard<InterpreterUnlock>())
      .def("contiguous_end", &RedisSource::contiguous_end, py::arg("offset"));
  py::class_<RedisWriter>(m, "RedisWriter")
      .def(py::init([](const py::dict& settings, uint64_t max_nbytes, uint64_t split_nbytes) {
             return std::make_unique<RedisWriter>(to_options(settings),
                                                  io::RedisValueLimits{max_nbytes, split_nbytes});
           }),
           py::arg("settings"), py::arg("max_value_nbytes"), py::arg("split_nbytes"))
      .def(
          "exist",
          [](RedisWriter& writer, const std::vector<std::string>& keys) {
            return run_interruptible(
                [&](const std::stop_token& stop) { return writer.exist(keys, stop); });
          },
          py::arg("keys"))
      .def(
          "remove",
          [](RedisWriter& writer, const std::string& key) {
            run_interruptible([&](const std::stop_token& stop) { writer.remove(key, stop); });
          },
          py::arg("key"))
      .def("put", &put, py::arg("key"), py::arg("value"))
      .def("write", &write_records, py::arg("source"), py::arg("records"));
}

}  // namespace tensorizer::bind
