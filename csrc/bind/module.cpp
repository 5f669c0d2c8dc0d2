// tensorizer._C: calls the register function of each binding file.
#include <pybind11/pybind11.h>

#include "bind/bindings.h"
#include "bind/gil.h"
#include "device/cuda/cuda_copy.h"
#include "io/http/http_reactor.h"

namespace {

// Loads of other threads must have ended before the interpreter frees what they use, and before the
// driver is taken down by its own handlers. Handlers that are registered later run earlier, so
// uploads and caches that end at exit still can.
void end_work_at_exit() {
  namespace py = pybind11;
  py::module_::import("atexit").attr("register")(py::cpp_function(
      [] {
        tensorizer::bind::ActiveWork::instance().shut_down(std::chrono::seconds(10));
        tensorizer::io::HttpReactor::of_process().shut_down();
        tensorizer::device::cuda::shut_down();
      },
      py::call_guard<tensorizer::bind::InterpreterUnlock>()));
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() =
      "The compiled half of tensorizer. Private: signatures may change between any two releases.";
  end_work_at_exit();
  tensorizer::bind::register_errors(m);
  tensorizer::bind::register_io(m);
  tensorizer::bind::register_file(m);
  tensorizer::bind::register_crypto(m);
  tensorizer::bind::register_authenticity(m);
  tensorizer::bind::register_cuda(m);  // copy engines, which loads and saves take
  tensorizer::bind::register_load(m);
  tensorizer::bind::register_batch(m);
  tensorizer::bind::register_save(m);
  tensorizer::bind::register_safetensors(m);
  tensorizer::bind::register_http(m);
  tensorizer::bind::register_cache(m);
  tensorizer::bind::register_redis(m);
  tensorizer::bind::register_multipart(m);
  tensorizer::bind::register_sync(m);
  tensorizer::bind::register_versions(m);
}
