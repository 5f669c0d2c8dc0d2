// Forward reader over bytes that are not trusted. All parsing goes through it: bounds are checked
// here, once. Confined to one thread; borrows the bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "core/endian.h"
#include "core/error.h"

namespace tensorizer {

class ByteCursor {
 public:
  // `what` names the structure in messages ("index", "record header"); `origin` is the absolute
  // position of bytes[0] in the source. A read past the end throws `on_end`: malformed inside a
  // block whose length the file states itself, truncated where the block is whatever the source had
  // left.
  ByteCursor(std::span<const std::byte> bytes, std::string_view what, uint64_t origin = 0,
             Errc on_end = Errc::malformed) noexcept
      : bytes_(bytes), what_(what), origin_(origin), on_end_(on_end) {}

  std::span<const std::byte> take(uint64_t n, std::string_view field) {
    if (n > bytes_.size() - position_) fail_end(n, field);
    auto taken = bytes_.subspan(position_, n);
    position_ += n;
    return taken;
  }

  template <class T>
  T read_le(std::string_view field) {
    return load_le<T>(take(sizeof(T), field).data());
  }

  std::string_view take_text(uint64_t n, std::string_view field) {
    auto taken = take(n, field);
    return {reinterpret_cast<const char*>(taken.data()), taken.size()};
  }

  size_t position() const noexcept { return position_; }
  size_t remaining() const noexcept { return bytes_.size() - position_; }
  uint64_t offset() const noexcept { return origin_ + position_; }

  // Malformed content at the current position: "<what>: <problem> (field <field>, at byte N)".
  [[noreturn]] void fail(std::string_view field, const std::string& problem) const {
    throw Error(Errc::malformed,
                std::string(what_) + ": " + problem + " (field " + std::string(field) +
                    ", at byte " + std::to_string(offset()) + ")",
                {}, offset());
  }

 private:
  [[noreturn]] void fail_end(uint64_t n, std::string_view field) const {
    throw Error(on_end_,
                std::string(what_) + " ends too early: field " + std::string(field) + " at byte " +
                    std::to_string(offset()) + " wants " + std::to_string(n) + " bytes, " +
                    std::to_string(remaining()) + " left",
                {}, offset());
  }

  std::span<const std::byte> bytes_;
  std::string_view what_;
  uint64_t origin_;
  Errc on_end_;
  size_t position_ = 0;
};

}  // namespace tensorizer
