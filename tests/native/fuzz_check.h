// What the fuzz targets assert, and how they take their input apart.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <span>

#include "core/endian.h"

// A contradiction ends the process; the fuzzer keeps the input that led to it.
#define FUZZ_CHECK(condition)                                                             \
  do {                                                                                    \
    if (!(condition)) {                                                                   \
      std::fprintf(stderr, "%s:%d: contradiction: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                       \
    }                                                                                     \
  } while (false)

namespace tensorizer::testing {

inline std::span<const std::byte> fuzz_bytes(const uint8_t* data, size_t size) {
  return {reinterpret_cast<const std::byte*>(data), size};
}

// Takes an integer from the front of the input; zero where the input has run out.
template <class T>
T take_integer(std::span<const std::byte>& input) {
  if (input.size() < sizeof(T)) {
    input = {};
    return 0;
  }
  const T value = load_le<T>(input.data());
  input = input.subspan(sizeof(T));
  return value;
}

}  // namespace tensorizer::testing
