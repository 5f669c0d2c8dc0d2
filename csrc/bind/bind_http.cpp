// HTTP sources and uploads, and their settings.
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>

#include "bind/bindings.h"
#include "bind/gil.h"
#include "io/http/http_put.h"
#include "io/http/http_source.h"

namespace tensorizer::bind {
namespace {

using io::HttpOptions;
using io::HttpSource;

// The values for get(options); milliseconds are seconds in Python.
template <class Get>
void property(py::class_<HttpOptions>& c, const char* name, Get get) {
  using Value = std::remove_cvref_t<decltype(get(std::declval<HttpOptions&>()))>;
  if constexpr (std::is_same_v<Value, std::chrono::milliseconds>) {
    c.def_property(
        name, [get](HttpOptions& o) { return std::chrono::duration<double>(get(o)).count(); },
        [get](HttpOptions& o, double s) { get(o) = milliseconds_of(s); });
  } else {
    c.def_property(
        name, [get](HttpOptions& o) { return get(o); },
        [get](HttpOptions& o, Value value) { get(o) = std::move(value); });
  }
}

// Header bytes are not always UTF-8.
py::str latin1(const std::string& text) {
  PyObject* result =
      PyUnicode_DecodeLatin1(text.data(), static_cast<Py_ssize_t>(text.size()), nullptr);
  if (result == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::str>(result);
}

// A Python callable without arguments, for any thread; None gives an empty function.
template <class Result>
std::function<Result()> function_of(const py::object& callable) {
  if (callable.is_none()) return {};
  return [held = keep_alive(callable)] {
    const InterpreterLock locked;
    return call(held.get(), {}).template cast<Result>();
  };
}

// A Python callable that gives (name, value) pairs.
void set_header_provider(HttpOptions& options, const py::object& callable) {
  options.header_provider = function_of<io::HttpHeaderList>(callable);
}

// A Python callable that gives the file and the folder of the trust anchors.
void set_trust_provider(HttpOptions& options, const py::object& callable) {
  options.find_trust = [places = function_of<std::pair<std::string, std::string>>(callable)] {
    auto [file, folder] = places();
    return io::CurlTrust{.ca_file = std::move(file), .ca_path = std::move(folder)};
  };
}

void register_options(py::module_& m) {
  using io::HttpVersion;
  py::enum_<HttpVersion>(m, "HttpVersion")
      .value("automatic", HttpVersion::automatic)
      .value("http1", HttpVersion::http1)
      .value("http2", HttpVersion::http2);
  py::class_<HttpOptions> c(m, "HttpOptions");
  c.def(py::init<>())
      .def_readwrite("headers", &HttpOptions::headers)
      .def_readwrite("user_agent", &HttpOptions::user_agent)
      .def_readwrite("connections", &HttpOptions::connections)
      .def_readwrite("max_connections", &HttpOptions::max_connections)
      .def_readwrite("head_nbytes", &HttpOptions::head_nbytes)
      .def_readwrite("unit_nbytes", &HttpOptions::unit_nbytes)
      .def_readwrite("version", &HttpOptions::version)
      .def_readwrite("proxy", &HttpOptions::proxy)
      .def_property("trust_provider", nullptr, &set_trust_provider)
      .def_property("header_provider", nullptr, &set_header_provider);
  property(c, "ca_file", [](HttpOptions& o) -> auto& { return o.trust.ca_file; });
  property(c, "ca_path", [](HttpOptions& o) -> auto& { return o.trust.ca_path; });
  property(c, "verify_peer", [](HttpOptions& o) -> auto& { return o.trust.verify_peer; });
  property(c, "retries", [](HttpOptions& o) -> auto& { return o.retry.retries; });
  property(c, "connect_timeout", [](HttpOptions& o) -> auto& { return o.connect_timeout; });
  property(c, "stall_timeout", [](HttpOptions& o) -> auto& { return o.stall_timeout; });
  property(c, "retry_seconds", [](HttpOptions& o) -> auto& { return o.retry.window; });
  property(c, "first_answer_seconds",
           [](HttpOptions& o) -> auto& { return o.retry.first_answer_window; });
  property(c, "first_retry_delay", [](HttpOptions& o) -> auto& { return o.retry.first_delay; });
  property(c, "max_retry_delay", [](HttpOptions& o) -> auto& { return o.retry.max_delay; });
}

std::shared_ptr<HttpSource> open_http(const std::string& url, const HttpOptions& options,
                                      uint64_t begin, std::optional<uint64_t> end,
                                      const py::object& url_provider, double url_lifetime,
                                      const std::string& display_name,
                                      const std::optional<std::string>& known_etag,
                                      uint64_t known_nbytes) {
  io::HttpAddress address{url, function_of<std::string>(url_provider),
                          std::chrono::seconds(std::llround(url_lifetime)), display_name};
  return run_interruptible([&](const std::stop_token& stop) {
    std::optional<io::ResourceIdentity> known;
    if (known_etag) known = {.etag = known_etag, .last_modified = {}, .size = known_nbytes};
    return HttpSource::open(std::move(address), options, begin, end, stop, std::move(known));
  });
}

void register_source(py::module_& m) {
  py::class_<HttpSource, io::RangeSource, std::shared_ptr<HttpSource>>(m, "HttpSource")
      .def_static("open", &open_http, py::arg("url"), py::arg("options"), py::kw_only(),
                  py::arg("begin") = 0, py::arg("end") = py::none(),
                  py::arg("url_provider") = py::none(), py::arg("url_lifetime") = 0.0,
                  py::arg("display_name") = "", py::arg("known_etag") = py::none(),
                  py::arg("known_nbytes") = 0)
      .def_property_readonly("is_known", &HttpSource::is_known)
      .def("fix_connections", &HttpSource::fix_connections, py::arg("connections"),
           py::call_guard<InterpreterUnlock>())
      .def("close_connections", &HttpSource::close_connections, py::call_guard<InterpreterUnlock>())
      .def_property_readonly("response_status_line",
                             [](const HttpSource& s) { return s.response().status_line; })
      .def_property_readonly("response_headers",
                             [](const HttpSource& s) {
                               py::list fields;
                               for (const auto& [name, value] : s.response().headers)
                                 fields.append(py::make_tuple(latin1(name), latin1(value)));
                               return fields;
                             })
      .def_property_readonly("sequential",
                             [](const HttpSource& s) { return s.traits().sequential; })
      .def_property_readonly("seconds_to_connect", &HttpSource::seconds_to_connect)
      .def_property_readonly("seconds_to_response", &HttpSource::seconds_to_response)
      .def_property_readonly("requests", &HttpSource::requests)
      .def_property_readonly("connections", &HttpSource::connections);
}

py::dict put_bytes(io::HttpUploader& uploader, const py::object& url, const py::buffer& body,
                   const io::HttpHeaderList& headers, const std::string& display_name) {
  const BytesView view(body);
  io::HttpPut put;
  std::function<std::string()> give_url;
  if (py::isinstance<py::str>(url)) {
    give_url = [text = url.cast<std::string>()] { return text; };
  } else {
    give_url = function_of<std::string>(url);
  }
  put.target = [&] { return io::HttpPut::Target{give_url(), headers}; };
  put.display_name = display_name;
  put.body = view.bytes();
  const io::HttpResponse response = run_interruptible(
      [&](const std::stop_token& stop) { return io::http_put(uploader, put, stop); });
  py::dict result;
  for (const auto& [name, value] : response.headers) result[latin1(name)] = latin1(value);
  return result;
}

void register_uploader(py::module_& m) {
  py::class_<io::HttpUploader, std::shared_ptr<io::HttpUploader>>(m, "HttpUploader")
      .def(py::init<const HttpOptions&>(), py::arg("options"))
      .def("put", &put_bytes, py::arg("url"), py::arg("body"), py::kw_only(),
           py::arg("headers") = io::HttpHeaderList(), py::arg("display_name") = "")
      .def(
          "close_connections", [](io::HttpUploader& u) { u.places.close(); },
          py::call_guard<InterpreterUnlock>())
      .def_property_readonly("requests",
                             [](const io::HttpUploader& u) { return u.counters.requests.load(); });
}

}  // namespace

void register_http(py::module_& m) {
  register_options(m);
  register_source(m);
  register_uploader(m);
  m.def("default_certificates", &io::built_in_anchors);
}

}  // namespace tensorizer::bind
