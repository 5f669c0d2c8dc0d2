// Multipart uploads: Python (tensorizer/_io/s3/upload.py) decides and signs, libcurl moves the
// bytes.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bind/bindings.h"
#include "bind/gil.h"
#include "core/per_process.h"
#include "core/sync.h"
#include "digest/digest.h"
#include "io/http/http_put.h"
#include "io/upload/multipart_sink.h"

namespace tensorizer::bind {
namespace {

using io::MultipartSink;

// The callbacks are methods of a Python object: create(), request(number, crc32),
// adapt(number, status, reason), complete(etags), abort(). Part 0 stands for the whole object.
// create() and complete() wait for the store in Python, so they run where Ctrl-C reaches them.
class PythonTransport final : public io::MultipartTransport {
 public:
  PythonTransport(py::object upload, std::string name, io::HttpOptions options)
      : upload_(keep_alive(std::move(upload))),
        name_(std::move(name)),
        uploader_(std::move(options)) {}

  void create(const std::stop_token&) override {
    on_calling_thread([&] { call_python([&] { upload().attr("create")(); }); });
    uploader_.counters.answered.store(true, std::memory_order_relaxed);
  }

  std::string put_part(int number, io::ConstBuffer bytes, const std::stop_token& stop) override {
    const io::HttpResponse response = put(number, bytes, stop);
    return etag_of(response, "the answer to part " + std::to_string(number));
  }

  void complete(const std::vector<std::string>& etags, const std::stop_token&) override {
    uploader_.places.close();
    on_calling_thread([&] { call_python([&] { upload().attr("complete")(etags); }); });
  }

  void abort() noexcept override {
    uploader_.places.close();
    if (interpreter_is_finalizing()) return;
    try {
      call_python([&] { upload().attr("abort")(); });
    } catch (...) {  // the failure that led here is the one to report; abort() itself logs
    }
  }

  void put_object(io::ConstBuffer bytes, const std::stop_token& stop) override {
    const io::HttpResponse response = put(0, bytes, stop);
    uploader_.places.close();
    etag_of(response, "the answer");
  }

 private:
  py::handle upload() const noexcept { return upload_.get(); }

  // Status 200 alone is no proof: a gateway or a login page answers so, too, and stores nothing.
  // Stores repeat an ETag in XML, so an ETag that is not text did not come from them.
  std::string etag_of(const io::HttpResponse& response, const std::string& answer) const {
    const auto etag = io::find_field(response.headers, "etag");
    const auto is_text = [](char c) { return c > ' ' && c <= '~'; };
    if (!etag || etag->empty() || !std::ranges::all_of(*etag, is_text))
      throw Error(
          Errc::io,
          "Failed to write " + name_ + ": " + answer + " has no ETag; the server does not speak S3",
          name_);
    return std::string(*etag);
  }

  io::HttpResponse put(int number, io::ConstBuffer bytes, const std::stop_token& stop) {
    const uint32_t crc32 = digest::crc32(0, bytes);
    io::HttpPut request;
    request.target = [&] {
      return call_python([&] {
        const py::tuple given = upload().attr("request")(number, crc32);
        return io::HttpPut::Target{given[0].cast<std::string>(),
                                   given[1].cast<io::HttpHeaderList>()};
      });
    };
    request.adapt = [&](const io::HttpFailure& failure) {
      return call_python([&] {
        return upload().attr("adapt")(number, failure.status, failure.reason).cast<bool>();
      });
    };
    request.display_name = name_;
    request.body = bytes;
    return io::http_put(uploader_, request, stop);
  }

  const std::shared_ptr<PyObject> upload_;
  const std::string name_;
  io::HttpUploader uploader_;
};

// The end of an upload waits for its threads, which may be waiting for the lock.
void destroy(MultipartSink* sink) {
  if (!sink->is_of_this_process() || interpreter_is_finalizing()) return;  // leaks on purpose
  if (!PyGILState_Check()) {
    delete sink;
    return;
  }
  InterpreterUnlock unlocked;
  delete sink;
}

// Uploads that may still be running, to be given up when the interpreter ends: its threads could
// not take the lock any more. The Python handles do not tell, a session keeps its sink without one.
class OpenUploads {
 public:
  static OpenUploads& instance() {
    static PerProcess<OpenUploads> uploads;
    return uploads.get();
  }

  void add(const std::shared_ptr<MultipartSink>& sink) {
    MutexLock lock(mutex_);
    std::erase_if(sinks_,
                  [](const std::weak_ptr<MultipartSink>& known) { return known.expired(); });
    sinks_.push_back(sink);
  }

  // REQUIRES: the caller does not hold the interpreter's lock.
  void abandon_all() {
    std::vector<std::weak_ptr<MultipartSink>> sinks;
    {
      MutexLock lock(mutex_);
      sinks.swap(sinks_);
    }
    for (const std::weak_ptr<MultipartSink>& known : sinks)
      if (const std::shared_ptr<MultipartSink> sink = known.lock()) sink->abandon();
  }

 private:
  Mutex mutex_;
  std::vector<std::weak_ptr<MultipartSink>> sinks_ GUARDED_BY(mutex_);
};

std::shared_ptr<MultipartSink> make_sink(py::object upload, const std::string& name,
                                         const io::HttpOptions& http, unsigned uploads,
                                         uint64_t budget_nbytes, uint64_t min_part_nbytes,
                                         uint64_t max_part_nbytes) {
  auto transport = std::make_unique<PythonTransport>(std::move(upload), name, http);
  const io::MultipartOptions options{uploads, budget_nbytes, min_part_nbytes, max_part_nbytes};
  std::shared_ptr<MultipartSink> sink(new MultipartSink(std::move(transport), name, options),
                                      &destroy);
  OpenUploads::instance().add(sink);
  return sink;
}

}  // namespace

void register_multipart(py::module_& m) {
  using Lock = py::call_guard<InterpreterUnlock>;
  py::module_::import("atexit").attr("register")(
      py::cpp_function([] { OpenUploads::instance().abandon_all(); }, Lock()));
  py::class_<MultipartSink, io::RangeSink, std::shared_ptr<MultipartSink>>(m, "MultipartSink")
      .def(py::init(&make_sink), py::arg("upload"), py::arg("name"), py::arg("http"), py::kw_only(),
           py::arg("uploads"), py::arg("budget_nbytes"), py::arg("min_part_nbytes"),
           py::arg("max_part_nbytes"))
      .def_property_readonly("has_content", &MultipartSink::has_content)
      .def_property_readonly("peak_nbytes", &MultipartSink::peak_nbytes);
}

}  // namespace tensorizer::bind
