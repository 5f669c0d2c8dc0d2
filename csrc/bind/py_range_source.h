// A source behind a Python callable that returns a range of bytes: file systems that only Python
// can speak to. Safe from many threads; the callable must be so too, and may wait without the lock.
#pragma once

#include <atomic>
#include <memory>
#include <string>

#include "bind/gil.h"
#include "io/range_source.h"

namespace tensorizer::bind {

class PyRangeSource final : public io::RangeSource {
 public:
  // read(offset, nbytes) returns an object with exactly `nbytes` bytes, or fewer at the end.
  PyRangeSource(py::object read, uint64_t nbytes, std::string name, const io::SourceTraits& traits)
      : read_(keep_alive(std::move(read))),
        nbytes_(nbytes),
        name_(std::move(name)),
        traits_(traits) {}

  const std::string& name() const noexcept override { return name_; }
  std::optional<uint64_t> size() const override { return nbytes_; }
  io::SourceTraits traits() const override { return traits_; }
  using RangeSource::read_at;
  void read_at(uint64_t offset, std::span<const io::Buffer> buffers,
               const std::stop_token& stop) override;
  uint64_t bytes_read() const noexcept override { return bytes_read_.load(); }

 private:
  const std::shared_ptr<PyObject> read_;
  const uint64_t nbytes_;
  const std::string name_;
  const io::SourceTraits traits_;
  std::atomic<uint64_t> bytes_read_{0};
};

}  // namespace tensorizer::bind
