#include "bind/py_file_sink.h"

#include <vector>

#include "bind/calling_thread.h"
#include "bind/gil.h"
#include "bind/py_file_source.h"
#include "core/error.h"

namespace tensorizer::bind {
namespace {

constexpr uint64_t kWriteNbytes = uint64_t{16}
                                  << 20;  // per call, so that Ctrl-C is noticed in between
constexpr uint64_t kJoinNbytes = uint64_t{64}
                                 << 10;  // smaller pieces are joined before they are written

}  // namespace

PyFileSink::PyFileSink(py::object file, std::string name)
    : file_(file), kept_(keep_alive(std::move(file))), name_(std::move(name)) {}

void PyFileSink::write_at(uint64_t offset, std::span<const io::ConstBuffer> buffers,
                          const std::stop_token& stop) {
  std::vector<std::byte> joined;
  auto flush = [&] {
    write_locked(offset, joined, stop);
    offset += joined.size();
    joined.clear();
  };
  for (io::ConstBuffer buffer : buffers) {
    if (buffer.size() < kJoinNbytes) {
      joined.insert(joined.end(), buffer.begin(), buffer.end());
      if (joined.size() >= kWriteNbytes) flush();
      continue;
    }
    flush();
    while (!buffer.empty()) {
      throw_if_stopped(stop);
      const io::ConstBuffer now = buffer.first(std::min<uint64_t>(buffer.size(), kWriteNbytes));
      write_locked(offset, now, stop);
      offset += now.size();
      buffer = buffer.subspan(now.size());
    }
  }
  flush();
}

void PyFileSink::write_locked(uint64_t offset, io::ConstBuffer from, const std::stop_token& stop) {
  if (from.empty()) return;
  MutexLock lock(mutex_);
  const auto write = [&] {
    call_method("seek", {file_.ptr(), py::int_(offset).ptr()});
    while (!from.empty()) {
      throw_if_stopped(stop);
      const size_t n = call_with_view(file_.attr("write"),
                                      py::memoryview::from_memory(
                                          from.data(), static_cast<py::ssize_t>(from.size())),
                                      name_)
                           .value_or(0);
      if (n == 0 || n > from.size())
        throw Error(Errc::io,
                    name_ + " accepted " + std::to_string(n) + " of " +
                        std::to_string(from.size()) + " bytes",
                    name_);
      from = from.subspan(n);
    }
  };
  on_calling_thread([&] { with_name_in_errors(name_, write); });
}

void PyFileSink::reserve(uint64_t /*end*/) {
  if (damaged_) io::throw_damaged(name_);
}

// Back to front, so that no byte is overwritten before it has moved.
void PyFileSink::relocate(uint64_t from, uint64_t nbytes, uint64_t to,
                          const std::stop_token& stop) {
  if (damaged_) io::throw_damaged(name_);
  std::unique_ptr<PyFileSource> source;
  on_calling_thread([&] {
    source = std::make_unique<PyFileSource>(py::reinterpret_borrow<py::object>(file_), name_);
  });
  std::vector<std::byte> buffer(std::min({nbytes, kWriteNbytes, to - from}));
  for (uint64_t left = nbytes; left > 0;) {
    const uint64_t n = std::min<uint64_t>(left, buffer.size());
    left -= n;
    source->read_at(from + left, io::Buffer(buffer.data(), n), stop);
    if (to + left < from + nbytes) damaged_ = true;  // until all has moved
    write_locked(to + left, io::ConstBuffer(buffer.data(), n), stop);
  }
  damaged_ = false;
}

void PyFileSink::publish(uint64_t end, const std::stop_token& /*stop*/) {
  MutexLock lock(mutex_);
  const auto flush = [&] {
    call_method("seek", {file_.ptr(), py::int_(end).ptr()});
    if (py::hasattr(file_, "flush")) call_method("flush", {file_.ptr()});
  };
  on_calling_thread([&] { with_name_in_errors(name_, flush); });
}

}  // namespace tensorizer::bind
