// A sink over a Python file object: seek and write under the interpreter lock, one writer at a
// time.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <string>

#include "core/sync.h"
#include "io/range_sink.h"

namespace tensorizer::bind {

class PyFileSink final : public io::RangeSink {
 public:
  // `file` offers seek, write, and read where the index may have to grow. REQUIRES: the interpreter
  // lock is held.
  PyFileSink(pybind11::object file, std::string name);

  const std::string& name() const noexcept override { return name_; }
  using io::RangeSink::write_at;
  void write_at(uint64_t offset, std::span<const io::ConstBuffer> buffers,
                const std::stop_token& stop) override;
  void reserve(uint64_t end) override;
  void relocate(uint64_t from, uint64_t nbytes, uint64_t to, const std::stop_token& stop) override;
  void publish(uint64_t end, const std::stop_token& stop) override;
  void finish(const std::stop_token& /*stop*/) override {}

 private:
  void write_locked(uint64_t offset, io::ConstBuffer from, const std::stop_token& stop);

  const pybind11::handle file_;
  const std::shared_ptr<void> kept_;  // file_ itself
  std::string name_;
  bool damaged_ = false;  // a move in place failed halfway
  Mutex mutex_;           // taken before the interpreter lock, never while holding it
};

}  // namespace tensorizer::bind
