#include "bind/py_range_source.h"

#include "bind/calling_thread.h"
#include "bind/gil.h"
#include "core/error.h"

namespace tensorizer::bind {

void PyRangeSource::read_at(uint64_t offset, std::span<const io::Buffer> buffers,
                            const std::stop_token& stop) {
  throw_if_stopped(stop);
  const uint64_t wanted = io::total_nbytes(buffers);
  if (wanted == 0) return;
  if (offset > nbytes_ || wanted > nbytes_ - offset)
    io::throw_truncated(name_, offset, wanted, nbytes_);
  call_python([&] {
    const py::object result = [&] {
      const CallingThread::Running running;
      return call(read_.get(), {py::int_(offset).ptr(), py::int_(wanted).ptr()});
    }();
    const py::buffer_info info = py::buffer(result).request();
    const auto found = static_cast<uint64_t>(info.size * info.itemsize);
    if (found != wanted) io::throw_truncated(name_, offset, wanted, offset + found);
    const InterpreterUnlock unlocked;
    io::ScatterCursor(buffers).put({static_cast<const std::byte*>(info.ptr), wanted});
  });
  bytes_read_ += wanted;
}

}  // namespace tensorizer::bind
