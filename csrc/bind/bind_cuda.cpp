// CUDA devices as Python sees them: an engine per load or save, and the pinned memory of the
// process.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "bind/bindings.h"
#include "bind/gil.h"
#include "core/task_group.h"
#include "device/cuda/cuda_copy.h"

namespace tensorizer::bind {
namespace {

using device::CopyEngine;
using device::CopyPiece;
using device::SlotLease;
namespace cuda = device::cuda;

constexpr unsigned kMaxCopyThreads =
    4;  // of upload() and download(): enough to fill slots at memory speed

// Sessions never cut a chunk of the cipher (docs/format.md), so a slot has to hold one.
constexpr uint64_t kMinSlotNbytes = 2 << 20;

cuda::CudaCopyOptions make_options(int device, uintptr_t stream, unsigned slots,
                                   uint64_t slot_nbytes, double keep_idle_seconds,
                                   bool scatter_kernel) {
  if (slot_nbytes < kMinSlotNbytes)
    throw Error(Errc::invalid_argument, "bytes of a pinned slot: wanted " +
                                            std::to_string(kMinSlotNbytes) + " or more, found " +
                                            std::to_string(slot_nbytes));
  cuda::CudaCopyOptions options;
  options.device = device;
  options.caller_stream = stream;
  options.ring.slots = slots;
  options.ring.slot_nbytes = slot_nbytes;
  options.ring.keep_idle = std::chrono::duration_cast<std::chrono::milliseconds>(
      std::chrono::duration<double>(std::clamp(keep_idle_seconds, 0.0, 1e9)));
  options.scatter_kernel = scatter_kernel;
  return options;
}

// At exit the driver is taken down by its own handlers; nothing of ours may be inside it then.
void shut_down_at_exit() {
  static bool registered = false;  // under the interpreter lock
  if (registered) return;
  registered = true;
  const auto end_work = [] {
    ActiveWork::instance().shut_down(std::chrono::seconds(10));
    cuda::shut_down();
  };
  py::module_::import("atexit").attr("register")(
      py::cpp_function(end_work, py::call_guard<py::gil_scoped_release>()));
}

// The destructor waits for copies that are under way, a few milliseconds, and does so with the
// interpreter lock: a thread that let go of it inside a destructor could not come back once the
// interpreter ends.
std::shared_ptr<cuda::CudaCopyEngine> make_engine(int device, uintptr_t stream, unsigned slots,
                                                  uint64_t slot_nbytes, double keep_idle_seconds,
                                                  bool scatter_kernel) {
  const auto options =
      make_options(device, stream, slots, slot_nbytes, keep_idle_seconds, scatter_kernel);
  shut_down_at_exit();
  const py::gil_scoped_release unlocked;
  return std::make_shared<cuda::CudaCopyEngine>(options);
}

// Moves [0, nbytes) through the ring, slot by slot, on a few threads; `move` handles one slot's
// worth.
template <class Move>
void for_each_slot(CopyEngine& engine, uint64_t nbytes, const Move& move) {
  run_interruptible([&](const std::stop_token& stop) {
    std::atomic<uint64_t> next{0};
    TaskGroup group;
    const std::stop_callback forward(stop, [&] { group.request_stop(); });
    for (unsigned i = 0; i < kMaxCopyThreads; ++i)
      group.spawn([&](const std::stop_token& asked) {
        const uint64_t step = engine.slot_nbytes();
        for (uint64_t at = next.fetch_add(step); at < nbytes; at = next.fetch_add(step))
          move(at, std::min(step, nbytes - at), asked);
      });
    group.join();
    engine.drain();
  });
}

void upload(cuda::CudaCopyEngine& engine, const py::buffer& buffer, uintptr_t address) {
  const py::buffer_info info = buffer.request();
  const auto* from = static_cast<const std::byte*>(info.ptr);
  auto* to = reinterpret_cast<std::byte*>(address);
  engine.order_after_caller();
  for_each_slot(engine, static_cast<uint64_t>(info.size * info.itemsize),
                [&](uint64_t at, uint64_t nbytes, const std::stop_token& stop) {
                  SlotLease lease = engine.acquire(stop);
                  std::memcpy(lease.bytes().data(), from + at, nbytes);
                  const CopyPiece piece{0, to + at, nbytes};
                  engine.submit(std::move(lease), {&piece, 1});
                });
}

void download(cuda::CudaCopyEngine& engine, uintptr_t address, const py::buffer& buffer) {
  const py::buffer_info info = buffer.request(true);
  auto* to = static_cast<std::byte*>(info.ptr);
  auto* from = reinterpret_cast<std::byte*>(address);
  engine.order_after_caller();
  for_each_slot(engine, static_cast<uint64_t>(info.size * info.itemsize),
                [&](uint64_t at, uint64_t nbytes, const std::stop_token& stop) {
                  const SlotLease lease = engine.acquire(stop);
                  const CopyPiece piece{0, from + at, nbytes};
                  engine.fetch(lease, {&piece, 1}, stop);
                  std::memcpy(to + at, lease.bytes().data(), nbytes);
                });
}

// One slot's worth at once: (offset in the buffer, device address, bytes) each.
void upload_pieces(cuda::CudaCopyEngine& engine, const py::buffer& buffer,
                   const std::vector<std::tuple<uint64_t, uintptr_t, uint64_t>>& pieces) {
  const py::buffer_info info = buffer.request();
  const auto nbytes = static_cast<uint64_t>(info.size * info.itemsize);
  if (nbytes > engine.slot_nbytes())
    throw Error(Errc::invalid_argument, "upload_pieces: wanted " +
                                            std::to_string(engine.slot_nbytes()) +
                                            " bytes or less, found " + std::to_string(nbytes));
  std::vector<CopyPiece> copies;
  for (const auto& [offset, address, size] : pieces)
    copies.push_back({offset, reinterpret_cast<std::byte*>(address), size});
  engine.order_after_caller();
  run_interruptible([&](const std::stop_token& stop) {
    SlotLease lease = engine.acquire(stop);
    std::memcpy(lease.bytes().data(), info.ptr, nbytes);
    engine.submit(std::move(lease), copies);
    engine.drain();
  });
}

py::dict ring_status(int device) {
  const cuda::RingStatus status = cuda::ring_status(device);
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
  using Unlocked = py::call_guard<py::gil_scoped_release>;
  const cuda::RingSettings defaults;
  py::class_<CopyEngine, std::shared_ptr<CopyEngine>>(m, "CopyEngine")
      .def_property_readonly("slot_nbytes", &CopyEngine::slot_nbytes);
  py::class_<CudaCopyEngine, CopyEngine, std::shared_ptr<CudaCopyEngine>>(m, "CudaCopyEngine")
      .def(py::init(&make_engine), py::arg("device"), py::arg("stream"), py::kw_only(),
           py::arg("slots") = defaults.slots, py::arg("slot_nbytes") = defaults.slot_nbytes,
           py::arg("keep_idle_seconds") = 30.0, py::arg("scatter_kernel") = false)
      .def("order_after_caller", &CudaCopyEngine::order_after_caller, Unlocked())
      .def("cancel", &CudaCopyEngine::cancel, Unlocked())
      .def("upload", &upload, py::arg("buffer"), py::arg("address"))
      .def("upload_pieces", &upload_pieces, py::arg("buffer"), py::arg("pieces"))
      .def("download", &download, py::arg("address"), py::arg("buffer"));
  m.def("cuda_set_driver_library", &cuda::set_driver_library, py::arg("path"));
  m.def("cuda_driver_is_present", &cuda::driver_is_present, Unlocked());
  m.def("cuda_driver_version", [] { return cuda::driver().version; });
  m.def("cuda_has_kernels", &cuda::has_kernels);
  m.def("cuda_release_ring", &cuda::release_ring, py::arg("device"), Unlocked());
  m.def("cuda_release_all_rings", &cuda::release_all_rings, Unlocked());
  m.def("cuda_ring_status", &ring_status, py::arg("device"));
}

}  // namespace tensorizer::bind
