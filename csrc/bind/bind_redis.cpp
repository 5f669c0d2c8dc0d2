// Redis as Python sees it: a source. Python's own client writes.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>

#include "bind/bindings.h"
#include "bind/gil.h"
#include "io/redis/redis_source.h"

namespace tensorizer::bind {
namespace {

using io::RedisOptions;
using io::RedisSource;

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
  set_from(settings, "connect_timeout", options.socket.connect_timeout);
  set_from(settings, "stall_timeout", options.socket.stall_timeout);
  set_from(settings, "receive_buffer_nbytes", options.socket.receive_buffer_nbytes);
  set_from(settings, "tls", options.socket.tls);
  set_from(settings, "ca_file", options.socket.trust.ca_file);
  set_from(settings, "ca_path", options.socket.trust.ca_path);
  set_from(settings, "verify_certificate", options.socket.trust.verify_peer);
  set_from(settings, "user", options.user);
  set_from(settings, "password", options.password);
  set_from(settings, "database", options.database);
  set_from(settings, "connections", options.connections);
  set_from(settings, "retries", options.retry.retries);
  set_from(settings, "retry_seconds", options.retry.window);
  return options;
}

std::shared_ptr<RedisSource> open_redis(const py::dict& settings, const std::string& prefix) {
  const RedisOptions options = to_options(settings);
  return run_interruptible([&](const std::stop_token& stop) {
    return std::make_shared<RedisSource>(options, prefix, stop);
  });
}

}  // namespace

void register_redis(py::module_& m) {
  py::class_<RedisSource, io::RangeSource, std::shared_ptr<RedisSource>>(m, "RedisSource")
      .def(py::init(&open_redis), py::arg("settings"), py::arg("prefix"))
      .def_property_readonly("end", &RedisSource::end)
      .def("close_connections", &RedisSource::close_connections,
           py::call_guard<InterpreterUnlock>())
      .def("contiguous_end", &RedisSource::contiguous_end, py::arg("offset"));
}

}  // namespace tensorizer::bind
