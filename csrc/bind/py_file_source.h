// A source over a Python file object: seek and readinto under the interpreter lock, one reader at a
// time.
#pragma once

#include <pybind11/pybind11.h>

#include <atomic>
#include <memory>
#include <optional>
#include <string>

#include "core/sync.h"
#include "io/range_source.h"

namespace tensorizer::bind {

// Calls `method` with a memoryview of the memory, which is taken back before this returns or
// throws: what the callee, or the traceback of its exception, keeps of it is dead. Returns the
// count of bytes that the method answers, if it answers one. REQUIRES: the interpreter lock is
// held.
std::optional<size_t> call_with_view(const pybind11::object& method,
                                     const pybind11::memoryview& view, const std::string& name);

// Gives an OSError of the system that names no file a name. REQUIRES: the interpreter lock is held.
void name_os_error(const pybind11::object& error, const std::string& name);

// fn(), a use of a file object, whose errors of the system get its name: those of plain file
// objects have none. REQUIRES: the interpreter lock is held.
template <class Fn>
void with_name_in_errors(const std::string& name, Fn&& fn) {
  try {
    fn();
  } catch (pybind11::error_already_set& raised) {
    if (raised.matches(PyExc_OSError)) name_os_error(raised.value(), name);
    throw;
  }
}
class PyFileSource final : public io::RangeSource {
 public:
  // `file` offers seek and readinto (or read). REQUIRES: the interpreter lock is held.
  PyFileSource(pybind11::object file, std::string name);

  const std::string& name() const noexcept override { return name_; }
  std::optional<uint64_t> size() const override { return nbytes_; }
  io::SourceTraits traits() const override { return {.gap_nbytes = 4096, .sequential = true}; }
  using io::RangeSource::read_at;
  void read_at(uint64_t offset, std::span<const io::Buffer> buffers,
               const std::stop_token& stop) override;
  uint64_t read_up_to(uint64_t offset, io::Buffer into, const std::stop_token& stop) override;
  uint64_t bytes_read() const noexcept override {
    return bytes_read_.load(std::memory_order_relaxed);
  }

 private:
  // Returns the bytes read, fewer only at the end of the file.
  uint64_t read_locked(uint64_t offset, io::Buffer into, const std::stop_token& stop);
  size_t read_some(uint64_t offset, io::Buffer into);

  const pybind11::handle file_;
  const std::shared_ptr<void> kept_;  // file_ itself
  std::string name_;
  std::optional<uint64_t> nbytes_;
  bool has_readinto_ = false;
  Mutex mutex_;  // taken before the interpreter lock, never while holding it
  std::atomic<uint64_t> bytes_read_{0};
};

}  // namespace tensorizer::bind
