#include "bind/py_file_source.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "bind/calling_thread.h"
#include "bind/gil.h"
#include "bind/names.h"
#include "core/error.h"

namespace tensorizer::bind {
namespace {

constexpr uint64_t kReadNbytes = uint64_t{16}
                                 << 20;  // per call, so that Ctrl-C is noticed in between
// Pieces from here on go to where they stay by a call of their own; a copy would take longer.
constexpr uint64_t kOwnCallNbytes = uint64_t{64} << 10;

std::optional<uint64_t> measure(py::handle file) {
  try {
    const py::object here = file.attr("tell")();
    file.attr("seek")(0, 2);
    const auto end = file.attr("tell")().cast<uint64_t>();
    file.attr("seek")(here);
    return end;
  } catch (py::error_already_set& error) {
    // Objects that cannot seek to their end have an unknown size; Ctrl-C is nothing they said.
    if (error.matches(PyExc_Exception)) return std::nullopt;
    throw;
  } catch (py::cast_error&) {
    return std::nullopt;
  }
}

}  // namespace

std::optional<size_t> call_with_view(const py::object& method, const py::memoryview& view,
                                     const std::string& name) {
  py::object answer;
  try {
    answer = call(method, {view.ptr()});
  } catch (py::error_already_set&) {
    try {
      view.attr("release")();
    } catch (py::error_already_set&) {  // the buffer is still in use; the first error tells more
    }
    throw;
  }
  view.attr("release")();
  if (answer.is_none()) return std::nullopt;
  const Py_ssize_t n = PyNumber_AsSsize_t(answer.ptr(), PyExc_OverflowError);
  if (n == -1 && PyErr_Occurred() != nullptr) throw py::error_already_set();
  if (n < 0) throw Error(Errc::io, name + " answered a negative number of bytes", name);
  return static_cast<size_t>(n);
}

void name_os_error(const py::object& error, const std::string& name) {
  try {
    if (error.attr("errno").is_none() || !error.attr("filename").is_none()) return;
    error.attr("filename") = shown(name);
  } catch (py::error_already_set&) {  // other exceptions stay as they are
  }
}

PyFileSource::PyFileSource(py::object file, std::string name)
    : file_(file),
      kept_(keep_alive(std::move(file))),
      name_(std::move(name)),
      nbytes_(measure(file_)),
      has_readinto_(py::hasattr(file_, "readinto")) {}

void PyFileSource::read_at(uint64_t offset, std::span<const io::Buffer> buffers,
                           const std::stop_token& stop) {
  const auto fill = [&](io::Buffer into) {
    const uint64_t got = read_up_to(offset, into, stop);
    if (got < into.size())
      io::throw_truncated(name_, offset + got, into.size() - got, offset + got);
    offset += got;
  };
  const auto is_small = [](io::Buffer buffer) { return buffer.size() < kOwnCallNbytes; };
  while (!buffers.empty()) {
    const auto small =
        static_cast<size_t>(std::ranges::find_if_not(buffers, is_small) - buffers.begin());
    if (small < 2) {
      fill(buffers[0]);
      buffers = buffers.subspan(1);
      continue;
    }
    // One call, then a copy, is cheaper than a call each.
    std::vector<std::byte> joined(io::total_nbytes(buffers.first(small)));
    fill(joined);
    io::ScatterCursor(buffers.first(small)).put(joined);
    buffers = buffers.subspan(small);
  }
}

uint64_t PyFileSource::read_up_to(uint64_t offset, io::Buffer into, const std::stop_token& stop) {
  uint64_t done = 0;
  while (done < into.size()) {
    throw_if_stopped(stop);
    const io::Buffer now =
        into.subspan(done).first(std::min<uint64_t>(into.size() - done, kReadNbytes));
    const uint64_t got = read_locked(offset + done, now, stop);
    done += got;
    if (got < now.size()) break;
  }
  return done;
}

uint64_t PyFileSource::read_locked(uint64_t offset, io::Buffer into, const std::stop_token& stop) {
  const uint64_t begin = offset;
  MutexLock lock(mutex_);
  const auto fill = [&] {
    call_method("seek", {file_.ptr(), py::int_(offset).ptr()});
    while (!into.empty()) {
      throw_if_stopped(stop);
      const size_t got = read_some(offset, into);
      if (got == 0) return;
      if (got > into.size())
        throw Error(Errc::io, name_ + " returned more bytes than asked for", name_);
      offset += got;
      into = into.subspan(got);
      bytes_read_.fetch_add(got, std::memory_order_relaxed);
    }
  };
  on_calling_thread([&] { with_name_in_errors(name_, fill); });
  return offset - begin;
}

size_t PyFileSource::read_some(uint64_t offset, io::Buffer into) {
  if (has_readinto_) {
    const std::optional<size_t> got = call_with_view(
        file_.attr("readinto"),
        py::memoryview::from_memory(into.data(), static_cast<py::ssize_t>(into.size())), name_);
    if (got) return *got;
    // Simple wrappers forget the answer. Their position tells whether anything was read.
    const uint64_t now = call_method("tell", {file_.ptr()}).cast<uint64_t>();
    return now > offset ? now - offset : 0;
  }
  const py::object got = call_method("read", {file_.ptr(), py::int_(into.size()).ptr()});
  if (PyObject_CheckBuffer(got.ptr()) == 0)
    throw py::type_error(name_ + ": expected bytes from read(), got " +
                         Py_TYPE(got.ptr())->tp_name + "; open the file in binary mode");
  const auto copy =
      py::reinterpret_steal<py::bytes>(PyBytes_FromObject(got.ptr()));  // as is, if bytes
  if (!copy) throw py::error_already_set();
  const std::string_view bytes = copy;
  std::memcpy(into.data(), bytes.data(), std::min(bytes.size(), into.size()));
  return bytes.size();
}

}  // namespace tensorizer::bind
