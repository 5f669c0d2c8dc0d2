// The one exception type of the C++ side. Immutable after construction; safe to rethrow in another
// thread.
//
// The kind picks the Python class in one table (csrc/bind/errors.cpp, docs/errors.md). what() names
// the object and both numbers (wanted, got); it never holds a credential or a signed query.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <stdexcept>
#include <stop_token>
#include <string>
#include <string_view>
#include <utility>

namespace tensorizer {

enum class Errc : uint8_t {
  invalid_argument,  // the caller's mistake                         ValueError
  out_of_range,      // a number or name that its field cannot hold      FieldRangeError
  malformed,         // the bytes contradict docs/format.md          FormatError
  unsupported,       // a data version that is not known here        InvalidVersionError
  truncated,         // the source ended before the format said so   TruncatedError
  hash_mismatch,     // a stored digest disagrees with the data      HashMismatchError
  crypto,            // MAC, key or nonce rejected                   CryptographyError
  authentication,    // not what the tag or a signature says         AuthenticationError
  not_found,         // the source says there is no such thing       StreamNotFoundError
  io,                // the source or sink could not answer          StreamError
  out_of_memory,     // the host or device has no room               MemoryError /
                     // torch.OutOfMemoryError
  device,            // the accelerator or its driver failed         DeviceError
  cancelled,         // a stop was requested; users see the reason, not this
};

class Error : public std::runtime_error {
 public:
  Error(Errc code, const std::string& what) : std::runtime_error(what), code_(code) {}
  Error(Errc code, const std::string& what, std::string source_name,
        std::optional<uint64_t> at = std::nullopt)
      : std::runtime_error(what), source(std::move(source_name)), offset(at), code_(code) {}

  Errc code() const noexcept { return code_; }

  std::string source;               // redacted: no credentials, no signed query
  std::optional<uint64_t> offset;   // absolute position in the source, if known
  std::optional<uint32_t> version;  // the data version found, where it is unsupported
  int system_errno = 0;             // errno of a failed system call, 0 if there was none
  int http_status = 0;              // of the answer that was the last one, 0 if there was none

 private:
  Errc code_;
};

// "<operation> <object>: <strerror>", with the errno kept for the Python side.
[[noreturn]] void throw_errno(const std::string& operation, const std::string& object, int err);

// Whether an errno says that a file can have no more bytes.
bool is_full(int err) noexcept;

// The text with everything unprintable replaced, cut to `max_nbytes`: for messages.
std::string printable(std::string_view text, size_t max_nbytes = 200);

// What another side said, without these secrets and their longer words: it may quote the token of
// "Bearer <token>", or one field of a query.
std::string without_secrets(std::string text, std::span<const std::string> secrets);

// What a task does when it notices that it was asked to stop.
inline void throw_if_stopped(const std::stop_token& stop) {
  if (stop.stop_requested()) throw Error(Errc::cancelled, "cancelled");
}

}  // namespace tensorizer
