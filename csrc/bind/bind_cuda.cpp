// CUDA devices as Python sees them: an engine per load or save, and the pinned memory of the
// process.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bind/bindings.h"
#include "bind/gil.h"
#include "core/error.h"
#include "core/threads.h"
#include "device/cuda/cuda_copy.h"
#include "device/fetch_to_host.h"

namespace tensorizer::bind {
namespace {

using device::CopyEngine;
namespace cuda = device::cuda;

// Sessions never cut a chunk of the cipher (docs/format.md), so a buffer has to hold one.
constexpr uint64_t kMinSlotNbytes = 2 << 20;

cuda::CudaCopyOptions make_options(int device, uintptr_t stream, unsigned slots,
                                   uint64_t slot_nbytes, double keep_idle_seconds,
                                   bool open_on_device) {
  if (slot_nbytes < kMinSlotNbytes)
    throw Error(Errc::invalid_argument, "bytes of a pinned slot: expected " +
                                            std::to_string(kMinSlotNbytes) + " or more, got " +
                                            std::to_string(slot_nbytes));
  cuda::CudaCopyOptions options;
  options.device = device;
  options.caller_stream = stream;
  options.open_on_device = open_on_device ? cuda::OpenOnDevice::always : cuda::OpenOnDevice::never;
  options.pinned.slots = slots;
  options.pinned.slot_nbytes = slot_nbytes;
  options.pinned.keep_idle = milliseconds_of(std::clamp(keep_idle_seconds, 0.0, 1e9));
  return options;
}

// `warned` is of the process, under the interpreter lock: what is said here holds for every load.
void warn_once(bool& warned, const std::string& what) {
  if (what.empty() || std::exchange(warned, true)) return;
  if (PyErr_WarnEx(PyExc_RuntimeWarning, ("tensorizer: " + what).c_str(), 1) != 0)
    throw py::error_already_set();
}

std::shared_ptr<cuda::CudaCopyEngine> make_engine(int device, uintptr_t stream, unsigned slots,
                                                  uint64_t slot_nbytes, double keep_idle_seconds,
                                                  bool open_on_device) {
  const auto options =
      make_options(device, stream, slots, slot_nbytes, keep_idle_seconds, open_on_device);
  std::shared_ptr<cuda::CudaCopyEngine> engine;
  {
    const InterpreterUnlock unlocked;
    engine = std::make_shared<cuda::CudaCopyEngine>(options);
  }
  static bool warned = false;
  warn_once(warned, engine->shortage());
  return engine;
}

// Why the device's kernels are not used.
std::string why_not_opened(cuda::CudaCopyEngine& engine) {
  static const auto asked = interruptible(&cuda::CudaCopyEngine::why_not_opened);
  std::string why = asked(engine);
  static bool warned = false;
  if (const std::string wrong = engine.found_wrong(); !wrong.empty())
    warn_once(warned, wrong + "; this process does not use them");
  return why;
}

// (address on the device, address on the host, bytes) of each tensor.
void fetch_to_host(const std::vector<std::tuple<uint64_t, uint64_t, uint64_t>>& tensors,
                   CopyEngine& engine) {
  std::vector<device::HostCopy> copies;
  copies.reserve(tensors.size());
  for (const auto& [from, to, nbytes] : tensors)
    copies.push_back(
        {reinterpret_cast<std::byte*>(from), reinterpret_cast<std::byte*>(to), nbytes});
  engine.order_after_caller();
  run_interruptible(Where::helper_thread, [&](const std::stop_token& stop) {
    device::fetch_to_host(copies, engine, cpu_quota(), stop);
  });
}

py::dict pinned_status(int device) {
  const cuda::PinnedStatus status = cuda::pinned_status(device);
  py::dict result;
  result["present"] = status.present;
  result["users"] = status.users;
  result["slots"] = status.slots;
  result["free_slots"] = status.free_slots;
  result["slot_nbytes"] = status.slot_nbytes;
  return result;
}

}  // namespace

void register_cuda(py::module_& m) {
  using cuda::CudaCopyEngine;
  using Unlocked = py::call_guard<InterpreterUnlock>;
  const cuda::PinnedSettings defaults;
  py::class_<CopyEngine, std::shared_ptr<CopyEngine>>(m, "CopyEngine")
      .def_property_readonly("buffer_nbytes", &CopyEngine::buffer_nbytes);
  py::class_<CudaCopyEngine, CopyEngine, std::shared_ptr<CudaCopyEngine>>(m, "CudaCopyEngine")
      .def(py::init(&make_engine), py::arg("device"), py::arg("stream"), py::kw_only(),
           py::arg("slots") = defaults.slots, py::arg("slot_nbytes") = defaults.slot_nbytes,
           py::arg("keep_idle_seconds") = 30.0, py::arg("open_on_device") = false)
      .def("why_not_opened", &why_not_opened);
  m.def("fetch_to_host", &fetch_to_host, py::arg("tensors"), py::arg("engine"));
  m.def("cuda_set_driver_library", &cuda::set_driver_library, py::arg("path"));
  m.def("cuda_driver_is_present", &cuda::driver_is_present, Unlocked());
  m.def(
      "cuda_shares_host_memory",
      [](cuda::Ordinal device) { return cuda::Device::get(device).shares_host_memory(); },
      py::arg("device"), Unlocked());
  m.def("cuda_release_pinned", &cuda::release_pinned, py::arg("device"), Unlocked());
  m.def("cuda_release_all_pinned", &cuda::release_all_pinned, Unlocked());
  m.def("cuda_pinned_status", &pinned_status, py::arg("device"));
}

}  // namespace tensorizer::bind
